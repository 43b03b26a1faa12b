//! Parameters and results of methods, as JSON.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::rpc::{Failure, INVALID_PARAMS, UNKNOWN_METHOD};

/// The result of a method, or the failure.
pub(crate) type Outcome = Result<Value, Failure>;

/// Parses the parameters of a method.
pub(super) fn params<T: DeserializeOwned>(params: Value) -> Result<T, Failure> {
    serde_json::from_value(params).map_err(|why| {
        let hint = "docs/control.md has the parameters of each method";
        Failure::new(INVALID_PARAMS, format!("{why}; {hint}"))
    })
}

/// Serializes the result of a method.
pub(super) fn result(value: impl Serialize) -> Outcome {
    Ok(serde_json::to_value(value).map_err(anyhow::Error::from)?)
}

/// The failure for invalid parameters.
pub(super) fn invalid(why: String) -> Failure {
    Failure::new(INVALID_PARAMS, why)
}

/// The failure for a method that does not exist.
pub(super) fn unknown(method: &str) -> Failure {
    Failure::new(
        UNKNOWN_METHOD,
        format!("there is no method {method:?}; 'server.version' tells which there are"),
    )
}
