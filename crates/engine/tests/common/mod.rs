//! What the engine's tests share: a run on every engine that this host has.

use blockhouse_engine::{Engine, EngineChoice, EventLoop};

/// Runs `test` once per engine. An engine that this host refuses is named and passed over; the
/// worker threads can never be refused, so something always runs.
pub fn on_every_engine(mut test: impl FnMut(&mut EventLoop)) {
    for engine in Engine::ALL {
        match EventLoop::new(EngineChoice::Only(engine)) {
            Ok(mut event_loop) => {
                assert_eq!(event_loop.engine(), engine);
                test(&mut event_loop);
            }
            Err(error) => {
                assert_ne!(engine, Engine::Threads, "{error}");
                eprintln!("{engine} skipped: {error}");
            }
        }
    }
}
