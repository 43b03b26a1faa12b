//! The messages of the protocol, as the library that parses them hands them over.

use std::fs::File;

use blockhouse_core::{Storage, WriteCache};
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Backend, GpuBackend, VhostUserBackendReqHandlerMut};

use crate::config;
use crate::frontend::{Frontend, MOST_REGIONS, Result, refused};
use crate::queue::Manner;
use crate::vring::UserAddresses;

impl<S: Storage + Send + Sync> VhostUserBackendReqHandlerMut for Frontend<S> {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        // Deprecated, and sent by old front-ends to disable all rings.
        self.stop_all(Manner::Orderly);
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.reset();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(config::features(&*self.device().export.disk))
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        self.take_features(features)
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        self.replace_memory(regions, files).map(|()| None)
    }

    fn set_vring_num(&mut self, index: u32, count: u32) -> Result<()> {
        let vring = self.vring(index)?;
        if vring.running.is_some() {
            return Err(refused("another size for a queue that runs"));
        }
        // Whether it makes sense is checked when the queue starts.
        vring.size = u16::try_from(count).map_err(refused)?;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let addresses = UserAddresses { descriptors, available, used, log: Some(log) };
        self.set_addresses(index, flags, addresses)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let vring = self.vring(index)?;
        if vring.running.is_some() {
            return Err(refused("another base for a queue that runs"));
        }
        vring.next_available = u16::try_from(base).map_err(refused)?;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let vring = self.vring(index)?;
        vring.stop(Manner::Orderly);
        (vring.kick, vring.call) = (None, None);
        Ok(VhostUserVringState::new(index, vring.next_available.into()))
    }

    fn set_vring_kick(&mut self, index: u8, kick: Option<File>) -> Result<()> {
        self.set_kick(index.into(), kick)
    }

    fn set_vring_call(&mut self, index: u8, call: Option<File>) -> Result<()> {
        self.set_call(index.into(), call)
    }

    fn set_vring_err(&mut self, index: u8, error: Option<File>) -> Result<()> {
        self.vring(index.into())?.error = error.map(Into::into);
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(Self::protocol_features())
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        match features & !Self::protocol_features().bits() {
            0 => Ok(()),
            unknown => Err(refused(format_args!("unknown protocol features: {unknown:#x}"))),
        }
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.device().export.queues.into())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let vring = self.vring(index)?;
        vring.enabled = enable;
        if enable {
            return self.start_if_complete(index);
        }
        vring.stop(Manner::Orderly);
        Ok(())
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        let export = &self.device().export;
        let bytes = config::read(&*export.disk, export.queues, self.cache.reported(), offset, size);
        bytes.ok_or_else(|| refused("a range outside of the configuration space"))
    }

    fn set_config(
        &mut self,
        offset: u32,
        bytes: &[u8],
        _flags: VhostUserConfigFlags,
    ) -> Result<()> {
        let cache = match (offset, bytes) {
            (config::WRITEBACK, [0]) => WriteCache::None,
            (config::WRITEBACK, [1]) => WriteCache::Volatile,
            _ => return Err(refused("a change of something else than the write cache")),
        };
        let before = self.cache.reported();
        self.cache.set(cache);
        self.keep_cache();
        // From now on the driver takes all its writes for durable, also those of before.
        if (before, self.cache.reported()) == (WriteCache::Volatile, WriteCache::None) {
            self.flush()?;
        }
        Ok(())
    }

    fn set_backend_req_fd(&mut self, _socket: Backend) {
        // See `listener`.
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        self.make_tracking(wanted)
    }

    fn set_inflight_fd(&mut self, given: &VhostUserInflight, file: File) -> Result<()> {
        self.take_tracking(given, &file)
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MOST_REGIONS)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        self.add_memory(region, &file).map(|()| None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        self.remove_memory(region)
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        self.take_log(&file, log.mmap_offset, log.mmap_size)
    }

    // What follows belongs to features that are not offered.

    fn set_gpu_socket(&mut self, _socket: GpuBackend) -> Result<()> {
        Err(refused("a disk has no graphics"))
    }

    fn get_shared_object(&mut self, _object: VhostUserSharedMsg) -> Result<File> {
        Err(refused("a disk has no shared objects"))
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        Err(refused("a disk has no state to transfer"))
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(refused("a disk has no state to transfer"))
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(refused("a disk has no memory to share"))
    }
}
