//! The reason why an export cannot be used, as one line for users. Code that sends and receives
//! bytes returns the reason inside an `io::Error`.

/// A reason, with advice if known.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) what: String,
    pub(super) hint: Option<&'static str>,
}

impl From<String> for Refusal {
    fn from(what: String) -> Self {
        Self { what, hint: None }
    }
}

impl From<&str> for Refusal {
    fn from(what: &str) -> Self {
        what.to_owned().into()
    }
}

impl Refusal {
    /// The reason of a failed connection: the refusal in `error` (by TLS), or `error` itself.
    pub(super) fn of_connection(error: std::io::Error) -> Self {
        match error.downcast::<Self>() {
            Ok(refusal) => refusal,
            Err(error) => format!("the connection has failed: {error}").into(),
        }
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.hint {
            Some(hint) => write!(f, "{}; {hint}", self.what),
            None => f.write_str(&self.what),
        }
    }
}

impl std::error::Error for Refusal {}
