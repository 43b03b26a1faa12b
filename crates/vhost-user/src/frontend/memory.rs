//! The memory that a front-end shares: its regions, and their registration with the rings of loops.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use blockhouse_engine::{FaultDomain, GuestMemory, GuestRegion, Handle, SharedMemory};

use super::lost_memory;
use super::registration::Registration;
use crate::device::RegisteredMemory;
use crate::protocol::{MemoryRegion, Result, refused};

/// Maximum number of memory regions that a front-end may share; QEMU's limit for hot-plugged
/// memory.
pub const MAX_REGIONS: u64 = 509;

/// A front-end's memory.
pub struct MemoryTable {
    /// The fault domain of all memory that the front-end shares.
    domain: Arc<FaultDomain>,
    guest: GuestMemory,
    /// The regions as the front-end described them.
    regions: Vec<Region>,
    registration: Registration,
}

/// A region as a front-end described it. The file is kept for a process that continues the device.
type Region = (MemoryRegion, Arc<OwnedFd>);

/// The guest's memory after a change that is not applied yet.
pub struct ChangedMemory {
    guest: GuestMemory,
    regions: Vec<Region>,
    added: Vec<Arc<SharedMemory>>,
}

impl ChangedMemory {
    /// The guest's memory.
    pub fn guest(&self) -> &GuestMemory {
        &self.guest
    }

    fn add(
        &mut self,
        region: MemoryRegion,
        file: OwnedFd,
        domain: &Arc<FaultDomain>,
    ) -> Result<()> {
        let MemoryRegion { guest, size, user, offset } = region;
        // A region need not be a multiple of the page size; for example, libblkio puts its rings
        // into a region of 15,120 bytes.
        let memory = Arc::new(map(&file, offset, size, "guest memory", domain)?);
        if !self.guest.add(GuestRegion { guest, user_addr: user, memory: Arc::clone(&memory) }) {
            return Err(refused("regions of memory that overlap"));
        }
        self.regions.push((region, Arc::new(file)));
        self.added.push(memory);
        Ok(())
    }
}

impl MemoryTable {
    /// A table without memory. Memory that is added later belongs to this fault domain, and is
    /// registered if `wanted` says so.
    pub fn new(domain: Arc<FaultDomain>, wanted: RegisteredMemory) -> Self {
        let registration = Registration::new(wanted);
        Self { domain, guest: GuestMemory::new(), regions: Vec::new(), registration }
    }

    /// The guest's memory.
    pub fn guest(&self) -> &GuestMemory {
        &self.guest
    }

    /// The fault domain of all memory that the front-end shares.
    pub fn domain(&self) -> &Arc<FaultDomain> {
        &self.domain
    }

    /// The log line about lost memory; `None` if all memory can be accessed.
    pub fn lost(&self, inflight: Option<&SharedMemory>) -> Option<String> {
        self.domain.fault().map(|fault| lost_memory::describe(fault, &self.guest, inflight))
    }

    /// The memory with these regions in place of the current ones.
    pub fn replaced(
        &self,
        regions: impl IntoIterator<Item = (MemoryRegion, OwnedFd)>,
    ) -> Result<ChangedMemory> {
        let (guest, added) = (GuestMemory::new(), Vec::new());
        let mut changed = ChangedMemory { guest, regions: Vec::new(), added };
        for (region, file) in regions {
            changed.add(region, file, &self.domain)?;
        }
        Ok(changed)
    }

    /// A copy of the current memory, to be changed.
    fn unchanged(&self) -> ChangedMemory {
        let (guest, regions) = (self.guest.clone(), self.regions.clone());
        ChangedMemory { guest, regions, added: Vec::new() }
    }

    /// The memory with one more region.
    pub fn with(&self, region: MemoryRegion, file: OwnedFd) -> Result<ChangedMemory> {
        if self.guest.regions().len() as u64 >= MAX_REGIONS {
            return Err(refused("too many regions of memory"));
        }
        let mut changed = self.unchanged();
        changed.add(region, file, &self.domain)?;
        Ok(changed)
    }

    /// The memory without a region.
    pub fn without(&self, region: &MemoryRegion) -> Result<ChangedMemory> {
        let mut changed = self.unchanged();
        if !changed.guest.remove(region.guest, region.user, region.size) {
            return Err(refused("there is no such region of memory"));
        }
        // Regions do not overlap, so the guest's address identifies one region.
        changed.regions.retain(|(other, _)| other.guest != region.guest);
        Ok(changed)
    }

    /// Applies a change. With registered memory it waits for the pages of the added regions.
    pub fn adopt(&mut self, changed: ChangedMemory) {
        changed.added.iter().for_each(|memory| self.registration.prepare(memory));
        (self.guest, self.regions) = (changed.guest, changed.regions);
    }

    /// The regions with their files, for another process.
    ///
    /// # Errors
    /// If no more descriptors are available.
    pub fn describe(&self) -> io::Result<Vec<(MemoryRegion, OwnedFd)>> {
        let describe = |(region, file): &Region| Ok((*region, file.try_clone()?));
        self.regions.iter().map(describe).collect()
    }

    /// Registers the memory with the ring of a loop, if that is wanted.
    pub fn register(&mut self, event_loop: &Handle, disk: &str) {
        self.registration.register(&self.guest, event_loop, disk);
    }

    /// Maps other memory of the front-end; `what` names its purpose.
    pub fn map(&self, file: &OwnedFd, offset: u64, size: u64, what: &str) -> Result<SharedMemory> {
        map(file, offset, size, what, &self.domain)
    }
}

fn map(
    file: &OwnedFd,
    offset: u64,
    size: u64,
    what: &str,
    domain: &Arc<FaultDomain>,
) -> Result<SharedMemory> {
    let length = usize::try_from(size).map_err(refused)?;
    SharedMemory::map(file, offset, length, domain).map_err(|error| {
        refused(format_args!("cannot map {what}, {size} bytes at {offset}: {error}"))
    })
}
