//! Which engine a loop uses, how it is chosen, and why.

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Arc;

use crate::driver::Driver;
use crate::driver::epoll::Epoll;
use crate::driver::linux_aio::LinuxAio;
use crate::driver::loop_shared::LoopShared;
use crate::driver::ring_restrictions::DeviceCommands;
use crate::driver::uring::Uring;

/// An implementation of asynchronous file operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// io_uring, for files, sockets and events alike.
    IoUring,
    /// Linux AIO for direct I/O, worker threads for the rest, epoll for sockets.
    LinuxAio,
    /// Worker threads for files, epoll for sockets.
    Threads,
}

impl Engine {
    /// All engines, the best first. `auto` tries them in this order.
    pub const ALL: [Self; 3] = [Self::IoUring, Self::LinuxAio, Self::Threads];

    /// The name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::IoUring => "io_uring",
            Self::LinuxAio => "linux-aio",
            Self::Threads => "threads",
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Which engines are acceptable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// The best that this host allows.
    #[default]
    Auto,
    /// Only this engine.
    Only(Engine),
}

impl FromStr for EngineChoice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        if name == "auto" {
            return Ok(Self::Auto);
        }
        let found = Engine::ALL.into_iter().find(|engine| engine.as_str() == name);
        found.map(Self::Only).ok_or_else(|| {
            format!("there is no engine '{name}'; use auto, io_uring, linux-aio or threads")
        })
    }
}

/// The engine of a loop, and why better ones are not used.
#[derive(Clone, Debug)]
pub struct EngineReport {
    /// The engine in use.
    pub engine: Engine,
    /// The engines that were tried before and are not available here, each with the kernel's
    /// reason.
    pub refused: Vec<(Engine, String)>,
}

impl fmt::Display for EngineReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.engine)?;
        for (index, (engine, reason)) in self.refused.iter().enumerate() {
            let joint = if index == 0 { " (" } else { "; " };
            write!(f, "{joint}no {engine}: {reason}")?;
        }
        if self.refused.is_empty() { Ok(()) } else { f.write_str(")") }
    }
}

/// Opens the engine of a loop on the calling thread.
pub(crate) fn open(
    choice: EngineChoice,
    commands: DeviceCommands,
    shared: &Arc<LoopShared>,
) -> io::Result<(Box<dyn Driver>, EngineReport)> {
    if let EngineChoice::Only(engine) = choice {
        let driver = open_one(engine, commands, shared)?;
        return Ok((driver, EngineReport { engine, refused: Vec::new() }));
    }
    let mut refused = Vec::new();
    for engine in Engine::ALL {
        match open_one(engine, commands, shared) {
            Ok(driver) => return Ok((driver, EngineReport { engine, refused })),
            Err(error) if engine == Engine::Threads => return Err(error),
            Err(error) => refused.push((engine, error.to_string())),
        }
    }
    unreachable!("the last engine is returned or its error is")
}

fn open_one(
    engine: Engine,
    commands: DeviceCommands,
    shared: &Arc<LoopShared>,
) -> io::Result<Box<dyn Driver>> {
    Ok(match engine {
        Engine::IoUring => Box::new(Uring::open(shared, commands)?),
        Engine::LinuxAio => Box::new(Epoll::open(shared, Some(LinuxAio::open()?))?),
        Engine::Threads => Box::new(Epoll::open(shared, None)?),
    })
}
