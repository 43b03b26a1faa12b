//! The common environment of all questions: the disk that is measured, the engines, and the
//! duration of a sample.

use std::cell::{Cell, OnceCell};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use blockhouse_disk::ImageDisk;
use blockhouse_engine::{Engine, EngineChoice, EventLoop};
use blockhouse_images::CacheMode;

use super::device::Device;
use super::load::{self, Limits, Load, LoopSetup, Sample};
use super::stop::Stop;
use super::target::Target;

/// Bytes of the file that is read and written.
pub const DISK_SIZE: u64 = 256 << 20;

/// The disk that is measured, and what its measurements have in common.
pub struct Testbed {
    /// The disk, once [`fill`](Self::fill) has created it.
    disk: OnceCell<(Arc<ImageDisk>, CacheMode)>,
    engines: Vec<Engine>,
    device: Option<Device>,
    sample_time: Cell<Duration>,
    stop: Stop,
    /// The last field, so that its files are removed after everything that uses them was dropped.
    target: Target,
}

impl Testbed {
    /// A testbed on an unused target.
    ///
    /// # Errors
    /// The host allows no I/O engine.
    pub fn new(target: Target, stop: Stop) -> Result<Self> {
        let usable = |engine: &Engine| EventLoop::new(EngineChoice::Only(*engine)).is_ok();
        let engines: Vec<_> = Engine::ALL.into_iter().filter(usable).collect();
        ensure!(!engines.is_empty(), "no engine can be used here");
        let device = Device::under(target.path());
        let (disk, sample_time) = (OnceCell::new(), Cell::new(Duration::ZERO));
        Ok(Self { disk, engines, device, sample_time, stop, target })
    }

    /// Creates and fills the disk. The caller calls it once, before the first measurement.
    ///
    /// # Errors
    /// Errors of [`Target::new_disk`].
    pub fn fill(&self) -> Result<()> {
        let disk = self.target.new_disk(DISK_SIZE, &self.stop)?;
        assert!(self.disk.set(disk).is_ok(), "it is filled once");
        Ok(())
    }

    /// The disk.
    ///
    /// # Panics
    /// Before it is filled.
    pub fn disk(&self) -> &Arc<ImageDisk> {
        &self.disk.get().expect("measuring begins after the disk is filled").0
    }

    /// How the disk's file uses the page cache.
    ///
    /// # Panics
    /// Before the disk is filled.
    pub fn cache(&self) -> CacheMode {
        self.disk.get().expect("measuring begins after the disk is filled").1
    }

    /// The engines that this machine has, best first; at least one.
    pub fn engines(&self) -> &[Engine] {
        &self.engines
    }

    /// The device below the target, if the kernel has statistics of it.
    pub fn device(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    /// Where the files are.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Whether the user has asked to stop.
    pub fn stop(&self) -> &Stop {
        &self.stop
    }

    /// How long one sample lasts.
    pub fn sample_time(&self) -> Duration {
        self.sample_time.get()
    }

    /// Sets how long one sample lasts.
    pub fn set_sample_time(&self, time: Duration) {
        self.sample_time.set(time);
    }

    /// One sample of a load on the disk.
    ///
    /// # Errors
    /// Errors of [`load::measure`].
    pub fn sample(&self, setup: LoopSetup<'_>, load: Load) -> Result<Sample> {
        let limits = Limits { time: self.sample_time(), requests: load.most_requests() };
        load::measure(self.disk(), setup, (load, limits), (self.device(), &self.stop))
    }
}
