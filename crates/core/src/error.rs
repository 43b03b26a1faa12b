//! One error type for the data path: it keeps the errno that the guest must see and tells a person
//! in one line what failed, on which file and offset, why, and what to do.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::{fmt, io};

/// Result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The errno values that the data path uses, numbered as on Linux.
pub mod errno {
    /// Operation not permitted.
    pub const EPERM: i32 = 1;
    /// Input/output error.
    pub const EIO: i32 = 5;
    /// Interrupted system call.
    pub const EINTR: i32 = 4;
    /// Resource temporarily unavailable.
    pub const EAGAIN: i32 = 11;
    /// Cannot allocate memory.
    pub const ENOMEM: i32 = 12;
    /// Bad address: memory that is not mapped.
    pub const EFAULT: i32 = 14;
    /// No such device.
    pub const ENODEV: i32 = 19;
    /// Invalid argument.
    pub const EINVAL: i32 = 22;
    /// File too large.
    pub const EFBIG: i32 = 27;
    /// No space left on device.
    pub const ENOSPC: i32 = 28;
    /// Operation not supported.
    pub const EOPNOTSUPP: i32 = 95;
    /// Operation canceled.
    pub const ECANCELED: i32 = 125;
    /// Disk quota exceeded.
    pub const EDQUOT: i32 = 122;
    /// Cannot send after transport endpoint shutdown.
    pub const ESHUTDOWN: i32 = 108;
}

/// The kind of a failure, for code that handles failures by their kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request is invalid (bad range, bad option).
    InvalidInput,
    /// A write reaches past the end of the disk.
    PastEnd,
    /// The host has no space left for the data, or a quota or the maximum file size is reached.
    NoSpace,
    /// A write to a read-only image or disk, or EPERM, EACCES or EROFS from the host.
    ReadOnly,
    /// The storage, kernel or format cannot do this; nothing was changed.
    Unsupported,
    /// Another process holds the image's lock.
    Locked,
    /// The image's metadata is inconsistent.
    Corrupt,
    /// A record of changes is incomplete and stays so: its users must start with a full copy.
    LacksChanges,
    /// The host failed the operation.
    Io,
}

impl ErrorKind {
    fn errno(self) -> i32 {
        match self {
            Self::InvalidInput | Self::LacksChanges => errno::EINVAL,
            Self::PastEnd | Self::NoSpace => errno::ENOSPC,
            Self::ReadOnly => errno::EPERM,
            Self::Unsupported => errno::EOPNOTSUPP,
            Self::Locked => errno::EAGAIN,
            Self::Corrupt | Self::Io => errno::EIO,
        }
    }

    fn from_errno(code: i32) -> Self {
        match code {
            errno::EINVAL => Self::InvalidInput,
            errno::ENOSPC | errno::EDQUOT | errno::EFBIG => Self::NoSpace,
            errno::EPERM | 13 /* EACCES */ | 30 /* EROFS */ => Self::ReadOnly,
            errno::EOPNOTSUPP | 38 /* ENOSYS */ | 25 /* ENOTTY */ => Self::Unsupported,
            _ => Self::Io,
        }
    }
}

/// A failed operation. One pointer wide, so that results stay small on the path without errors.
pub struct Error(Box<Detail>);

struct Detail {
    kind: ErrorKind,
    errno: i32,
    what: Cow<'static, str>,
    path: Option<Box<str>>,
    offset: Option<u64>,
    hint: Option<Cow<'static, str>>,
    source: Option<Box<dyn StdError + Send + Sync>>,
    confined: bool,
    is_of_lost_storage: bool,
}

impl Error {
    /// An error that Blockhouse itself detects. `what` says what failed and why: "cannot write:
    /// ...".
    pub fn new(kind: ErrorKind, what: impl Into<Cow<'static, str>>) -> Self {
        Self(Box::new(Detail {
            kind,
            errno: kind.errno(),
            what: what.into(),
            path: None,
            offset: None,
            hint: None,
            source: None,
            confined: false,
            is_of_lost_storage: false,
        }))
    }

    /// An error from the host. `what` names the failed operation: "cannot write". The error keeps
    /// the errno of `source`; if `source` has none, the errno is EIO.
    pub fn host(what: impl Into<Cow<'static, str>>, source: io::Error) -> Self {
        let code = source.raw_os_error().unwrap_or(errno::EIO);
        let mut error = Self::new(ErrorKind::from_errno(code), what);
        error.0.errno = code;
        error.0.source = Some(Box::new(source));
        error
    }

    /// Adds the name of the file, unless there is one already.
    #[must_use]
    pub fn on(mut self, path: &str) -> Self {
        self.0.path.get_or_insert_with(|| path.into());
        self
    }

    /// Adds the offset in bytes, unless there is one already.
    #[must_use]
    pub fn at(mut self, offset: u64) -> Self {
        self.0.offset.get_or_insert(offset);
        self
    }

    /// Adds advice for the reader.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<Cow<'static, str>>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// Whether the host or the image caused the failure, and not the request. The operator should
    /// be notified of such a failure. EROFS and EPERM from the host are such failures, because a
    /// file system may become read-only, for instance after an error of its disk.
    pub fn is_host_failure(&self) -> bool {
        match self.kind() {
            ErrorKind::ReadOnly => self.0.source.is_some(),
            ErrorKind::InvalidInput
            | ErrorKind::PastEnd
            | ErrorKind::Unsupported
            | ErrorKind::LacksChanges => false,
            ErrorKind::NoSpace | ErrorKind::Locked | ErrorKind::Corrupt | ErrorKind::Io => true,
        }
    }

    /// Marks the failure as limited to the range of the failed operation: no other write is
    /// affected, and the host still reports losses of other writes to the next flush. Only a
    /// [`Storage`](crate::Storage) can know that.
    #[must_use]
    pub fn confined(mut self) -> Self {
        self.0.confined = true;
        self
    }

    /// Whether the failure is known to affect only the range of the failed operation.
    pub fn is_confined(&self) -> bool {
        self.0.confined
    }

    /// Marks the failure as that of a storage that cannot be reached at all.
    #[must_use]
    pub fn of_lost_storage(mut self) -> Self {
        self.0.is_of_lost_storage = true;
        self
    }

    /// Whether the storage cannot be reached at all: other ranges cannot be read either.
    pub fn is_of_lost_storage(&self) -> bool {
        self.0.is_of_lost_storage
    }

    /// The name of the file, if known.
    pub fn path(&self) -> Option<&str> {
        self.0.path.as_deref()
    }

    /// The kind of failure.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The errno that the guest must see; never 0.
    pub fn errno(&self) -> i32 {
        self.0.errno
    }

    /// A copy of the error, for callers that share one outcome. The copy has only the text of the
    /// source.
    pub fn duplicate(&self) -> Self {
        let detail = &self.0;
        Self(Box::new(Detail {
            kind: detail.kind,
            errno: detail.errno,
            what: detail.what.clone(),
            path: detail.path.clone(),
            offset: detail.offset,
            hint: detail.hint.clone(),
            source: detail.source.as_ref().map(|source| source.to_string().into()),
            confined: detail.confined,
            is_of_lost_storage: detail.is_of_lost_storage,
        }))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let detail = &self.0;
        if let Some(path) = &detail.path {
            write!(f, "{path}: ")?;
        }
        f.write_str(&detail.what)?;
        if let Some(offset) = detail.offset {
            write!(f, " at offset {offset}")?;
        }
        if let Some(source) = &detail.source {
            write!(f, ": {source}")?;
        }
        if let Some(hint) = &detail.hint {
            write!(f, "; {hint}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error({:?}, errno {}: {self})", self.0.kind, self.0.errno)
    }
}

// `Display` includes the source already. So `source()` returns `None`: a caller that prints the
// chain of causes must not print it twice.
impl StdError for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_names_what_where_why_and_what_to_do() {
        let error = Error::host("cannot write", io::Error::from_raw_os_error(errno::ENOSPC))
            .on("disk.img")
            .at(4096)
            .hint("free some room on the host");
        assert_eq!(
            error.to_string(),
            "disk.img: cannot write at offset 4096: No space left on device (os error 28); \
             free some room on the host"
        );
        assert_eq!((error.kind(), error.errno()), (ErrorKind::NoSpace, errno::ENOSPC));
    }

    #[test]
    fn a_duplicate_says_the_same() {
        let error = Error::host("cannot flush", io::Error::from_raw_os_error(errno::EIO)).on("x");
        let again = error.duplicate();
        assert_eq!(error.to_string(), again.to_string());
        assert_eq!(error.errno(), again.errno());
    }

    #[test]
    fn a_file_system_that_became_read_only_is_the_host_s_failure() {
        let of_host = |code| Error::host("cannot write", io::Error::from_raw_os_error(code));
        for code in [30, errno::EPERM, errno::EIO, errno::ENOSPC] {
            let error = of_host(code);
            assert!(error.is_host_failure() && error.duplicate().is_host_failure(), "{error}");
        }
        assert!(!Error::new(ErrorKind::ReadOnly, "opened for reading only").is_host_failure());
        assert!(!of_host(errno::EINVAL).is_host_failure());
    }

    #[test]
    fn the_first_context_is_kept() {
        let error = Error::new(ErrorKind::Io, "no").on("inner").on("outer").at(1).at(2);
        assert_eq!(error.to_string(), "inner: no at offset 1");
    }
}
