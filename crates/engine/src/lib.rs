//! The host side: event loop, the engines io_uring, linux-aio and threads, host files, sockets, wake-ups.
