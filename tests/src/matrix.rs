//! The combinations of engine and cache mode that tests are repeated with.

/// The cache modes that differ in the kind of I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// Direct I/O.
    None,
    /// Through the page cache.
    Writeback,
}

impl Cache {
    /// The name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Writeback => "writeback",
        }
    }
}

/// Makes six tests of each function that takes an [`Engine`](crate::Engine) and a
/// [`Cache`](crate::Cache).
#[macro_export]
macro_rules! on_every_engine_and_cache {
    ($($function:ident)*) => { $(
        mod $function {
            use $crate::{Cache, Engine};

            #[test]
            fn io_uring_none() {
                super::$function(Engine::IoUring, Cache::None);
            }
            #[test]
            fn io_uring_writeback() {
                super::$function(Engine::IoUring, Cache::Writeback);
            }
            #[test]
            fn linux_aio_none() {
                super::$function(Engine::LinuxAio, Cache::None);
            }
            #[test]
            fn linux_aio_writeback() {
                super::$function(Engine::LinuxAio, Cache::Writeback);
            }
            #[test]
            fn threads_none() {
                super::$function(Engine::Threads, Cache::None);
            }
            #[test]
            fn threads_writeback() {
                super::$function(Engine::Threads, Cache::Writeback);
            }
        }
    )* };
}

/// Makes three tests of each function that takes an [`Engine`](crate::Engine).
#[macro_export]
macro_rules! on_every_engine {
    ($($function:ident)*) => { $(
        mod $function {
            #[test]
            fn io_uring() {
                super::$function($crate::Engine::IoUring);
            }
            #[test]
            fn linux_aio() {
                super::$function($crate::Engine::LinuxAio);
            }
            #[test]
            fn threads() {
                super::$function($crate::Engine::Threads);
            }
        }
    )* };
}
