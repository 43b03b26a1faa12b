//! The first failure, remembered for good.

use std::sync::OnceLock;

use crate::{Error, Result};

/// Remembers the first failure that is reported to it, and repeats it from then on.
///
/// It is for failures after which the state is unknown, such as a failed flush: the host may have
/// dropped data, and its next flush may still succeed. Later failures follow from the first, so
/// they are not stored.
#[derive(Debug)]
pub struct ErrorLatch {
    first: OnceLock<Error>,
    hint: &'static str,
}

impl ErrorLatch {
    /// No failure so far. `hint` tells the user what to do when an operation is refused because of
    /// an earlier failure.
    pub const fn new(hint: &'static str) -> Self {
        Self { first: OnceLock::new(), hint }
    }

    /// Remembers a failure, unless there is one already.
    pub fn set(&self, error: &Error) {
        if self.first.get().is_none() {
            let _ = self.first.set(error.duplicate());
        }
    }

    /// The first failure.
    pub fn get(&self) -> Option<&Error> {
        self.first.get()
    }

    /// # Errors
    /// The first failure, with its errno, file and offset, and the hint.
    pub fn check(&self) -> Result<()> {
        match self.first.get() {
            None => Ok(()),
            Some(error) => Err(error.duplicate().hint(self.hint)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn the_first_failure_is_repeated_with_the_hint() {
        let latch = ErrorLatch::new("open the image again");
        assert!(latch.check().is_ok() && latch.get().is_none());
        latch.set(&Error::new(ErrorKind::Io, "the first").on("disk"));
        latch.set(&Error::new(ErrorKind::NoSpace, "the second"));
        for _ in 0..2 {
            let error = latch.check().expect_err("it has failed");
            assert_eq!(error.kind(), ErrorKind::Io);
            let text = error.to_string();
            assert!(text.contains("the first") && text.contains("open the image again"), "{text}");
        }
    }
}
