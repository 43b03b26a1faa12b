//! The device and a front-end with its driver, honest and hostile.
#![forbid(unsafe_code)]

mod common;
mod handing_over;
mod hostile;
mod lifecycle;
mod notifications;
mod registered;
mod requests;
