//! The shared parts of the engine's tests: a run on every engine that this host has, and an end to
//! waiting.

pub mod memory;
pub mod seeds;

use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use blockhouse_core::{ByteRange, Durability, Fua, IoVector, Result, Storage};
use blockhouse_engine::{Engine, EngineChoice, EventLoop, HostFile};

/// Long enough for any machine, short enough to wait for when something is broken.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A child process has, until its `exec`, the descriptors of all tests, and with them their file
/// locks. So it is one or the other: a test that looks at locks holds this, or a program starts.
pub fn no_program_starts() -> MutexGuard<'static, ()> {
    static STARTING: Mutex<()> = Mutex::new(());
    STARTING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a program to its end, while no test looks at locks.
pub fn output(command: &mut Command) -> std::io::Result<Output> {
    let _alone = no_program_starts();
    command.output()
}

/// Runs `test` once per engine. An engine that this host refuses is named and passed over; the
/// worker threads can never be refused, so something always runs.
pub fn on_every_engine(mut test: impl FnMut(&mut EventLoop)) {
    for_every_choice(|choice| test(&mut EventLoop::new(choice).unwrap()));
}

/// As [`on_every_engine`], for a test that makes its loops itself.
pub fn for_every_choice(mut test: impl FnMut(EngineChoice)) {
    for engine in Engine::ALL {
        let choice = EngineChoice::Only(engine);
        match EventLoop::new(choice) {
            Ok(event_loop) => {
                assert_eq!(event_loop.engine(), engine);
                drop(event_loop);
                test(choice);
            }
            Err(error) => {
                assert_ne!(engine, Engine::Threads, "{error}");
                eprintln!("{engine} skipped: {error}");
            }
        }
    }
}

/// A write as durable as asked. Where one write cannot be, a write and a flush, as the layer above
/// does it.
pub async fn write(
    file: &HostFile,
    offset: u64,
    from: IoVector,
    durability: Durability,
) -> Result<()> {
    let range = ByteRange::between(offset, offset + from.len() as u64);
    let capabilities = file.capabilities();
    let has_fua =
        capabilities.fua == Fua::Native && range.is_aligned(capabilities.alignment.offset.into());
    match durability {
        Durability::Data if has_fua => file.write(offset, from, durability).await,
        _ => {
            file.write(offset, from, Durability::None).await?;
            match durability.sync() {
                Some(sync) => file.flush(sync).await,
                None => Ok(()),
            }
        }
    }
}

/// Runs `test` on a thread of its own. Fails when that has not ended in time.
pub fn in_time<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, outcome) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        // Only a test that ran out of time has no receiver.
        let _ = done.send(test());
    });
    match outcome.recv_timeout(PATIENCE) {
        Ok(value) => value,
        Err(mpsc::RecvTimeoutError::Timeout) => {
            panic!("not done after {PATIENCE:?}: somebody waits in vain")
        }
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(thread.join().expect_err("it gave no value"))
        }
    }
}
