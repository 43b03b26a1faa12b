//! The structures that the driver reads and writes, as bytes and values (`<linux/ublk_cmd.h>`). All
//! fields are in native byte order.

/// Features of the driver or of a device (`UBLK_F_`).
pub mod ublk_flag {
    /// Data is transferred by registered buffers.
    pub const SUPPORT_ZERO_COPY: u64 = 1 << 0;
    /// The driver copies the data of a write only after a further command.
    pub const NEED_GET_DATA: u64 = 1 << 2;
    /// The device outlives its server.
    pub const USER_RECOVERY: u64 = 1 << 3;
    /// Requests that a dead server left unanswered are issued again to the next server.
    pub const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// Commands are numbered like ioctls.
    pub const CMD_IOCTL_ENCODE: u64 = 1 << 6;
    /// Data is transferred by reads and writes of the device's file.
    pub const USER_COPY: u64 = 1 << 7;
    /// The size can change while the device is used.
    pub const UPDATE_SIZE: u64 = 1 << 10;
    /// Data is transferred by buffers that the driver registers.
    pub const AUTO_BUF_REG: u64 = 1 << 11;
    /// Both ways by which a request's data is reached in the kernel's own pages: by a ring, in
    /// which the driver registers them, and by reads and writes of the device's file.
    pub const PAGES: u64 = USER_COPY | AUTO_BUF_REG;
    /// One command handles many requests.
    pub const BATCH_IO: u64 = 1 << 15;
    /// Data may be in shared memory.
    pub const SHMEM_ZC: u64 = 1 << 19;
}

/// States of a device (`UBLK_S_DEV_`).
pub mod ublk_state {
    /// Not started, or stopped.
    pub const DEAD: u16 = 0;
    /// The device takes requests.
    pub const LIVE: u16 = 1;
    /// The server has ended: requests wait for the next server.
    pub const QUIESCED: u16 = 2;
}

/// A command to `/dev/ublk-control`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UblkCommand {
    /// Stores the driver's features in the buffer, 8 bytes. Names no device.
    GetFeatures,
    /// Stores an [`UblkInfo`] in the buffer.
    GetInfo,
    /// Makes the device described by the [`UblkInfo`] in the buffer, and stores its properties
    /// there.
    Add,
    /// Removes a device, and waits until no process has it open.
    Delete,
    /// Removes a device without waiting: it vanishes when no process has it open.
    DeleteAsync,
    /// Makes the block device appear. Waits until each tag of each queue is fetched. The argument
    /// is the server's process ID.
    Start,
    /// Removes the block device; all commands of its queues complete.
    Stop,
    /// Sets the block device's parameters to those in the buffer.
    SetParameters,
    /// Stores the parameters in the buffer.
    GetParameters,
    /// Makes a device whose server has ended accept commands of this process.
    StartRecovery,
    /// Ends the recovery of a device. Waits and takes an argument like [`Start`](Self::Start).
    EndRecovery,
    /// Changes the size to the argument, in sectors of 512 bytes.
    UpdateSize,
}

/// Bytes of `struct ublksrv_ctrl_cmd`, which the number of a control command contains.
const CONTROL_BYTES: u32 = 32;
/// Bytes of `struct ublksrv_io_cmd`, for commands of queues.
const QUEUE_BYTES: u32 = 16;

/// `_IOR('u', number, …)` and `_IOWR('u', number, …)` of `<linux/ioctl.h>`.
const fn ioctl(is_write: bool, number: u32, size: u32) -> u32 {
    let direction = if is_write { 3 } else { 2 };
    direction << 30 | size << 16 | (b'u' as u32) << 8 | number
}

/// `UBLK_U_IO_FETCH_REQ`.
pub(super) const FETCH: u32 = ioctl(true, 0x20, QUEUE_BYTES);
/// `UBLK_U_IO_COMMIT_AND_FETCH_REQ`.
pub(super) const COMMIT_AND_FETCH: u32 = ioctl(true, 0x21, QUEUE_BYTES);

impl UblkCommand {
    /// The number of the command.
    pub(super) const fn code(self) -> u32 {
        let (is_write, number) = match self {
            Self::GetInfo => (false, 0x02),
            Self::Add => (true, 0x04),
            Self::Delete => (true, 0x05),
            Self::Start => (true, 0x06),
            Self::Stop => (true, 0x07),
            Self::SetParameters => (true, 0x08),
            Self::GetParameters => (false, 0x09),
            Self::StartRecovery => (true, 0x10),
            Self::EndRecovery => (true, 0x11),
            Self::GetFeatures => (false, 0x13),
            Self::DeleteAsync => (false, 0x14),
            Self::UpdateSize => (true, 0x15),
        };
        ioctl(is_write, number, CONTROL_BYTES)
    }
}

/// A control command as the driver reads it in a submission queue entry. `address` and `length`
/// describe the buffer.
pub(super) fn control_bytes(id: u32, address: u64, length: u16, argument: u64) -> [u8; 80] {
    let mut bytes = [0; 80];
    bytes[0..4].copy_from_slice(&id.to_ne_bytes());
    // The command belongs to no queue.
    bytes[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
    bytes[6..8].copy_from_slice(&length.to_ne_bytes());
    bytes[8..16].copy_from_slice(&address.to_ne_bytes());
    bytes[16..24].copy_from_slice(&argument.to_ne_bytes());
    bytes
}

/// A command of a queue (`struct ublksrv_io_cmd`) as the driver reads it in a submission queue
/// entry, without the address of its memory, which follows.
pub(super) fn queue_bytes(queue: u16, tag: u16, result: i32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[0..2].copy_from_slice(&queue.to_ne_bytes());
    bytes[2..4].copy_from_slice(&tag.to_ne_bytes());
    bytes[4..8].copy_from_slice(&result.to_ne_bytes());
    bytes
}

/// The address of an entry that makes the driver register the next request's pages in a slot of the
/// ring (`struct ublk_auto_buf_reg`). If it cannot, it hands the request over without
/// (`UBLK_AUTO_BUF_REG_FALLBACK`, [`UblkDescriptor::NOT_REGISTERED`]).
pub(super) fn slot_address(slot: u16) -> u64 {
    u64::from(slot) | 1 << 16
}

/// Where the data of a tag's request begins in the device's file, for reads and writes of the file.
pub(super) fn data_offset(queue: u16, tag: u16) -> u64 {
    0x8000_0000 + (u64::from(queue) << 41) + (u64::from(tag) << 25)
}

/// A device (`struct ublksrv_ctrl_dev_info`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UblkInfo {
    /// The number of queues.
    pub queues: u16,
    /// The number of requests that each queue may have in flight.
    pub depth: u16,
    /// One of [`ublk_state`].
    pub state: u16,
    /// The maximum size of a request in bytes.
    pub max_io_bytes: u32,
    /// The number; with `u32::MAX` the driver chooses one.
    pub id: u32,
    /// The server's process ID; -1 after the device was stopped.
    pub server: i32,
    /// A set of [`ublk_flag`].
    pub flags: u64,
    /// Data of the server, which the driver does not use (`ublksrv_flags`).
    pub note: u64,
}

impl UblkInfo {
    /// The size of the structure in bytes.
    pub const BYTES: usize = 64;

    /// The bytes that the driver reads.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0..2].copy_from_slice(&self.queues.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.depth.to_ne_bytes());
        bytes[4..6].copy_from_slice(&self.state.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.max_io_bytes.to_ne_bytes());
        bytes[12..16].copy_from_slice(&self.id.to_ne_bytes());
        bytes[16..20].copy_from_slice(&self.server.to_ne_bytes());
        bytes[24..32].copy_from_slice(&self.flags.to_ne_bytes());
        bytes[32..40].copy_from_slice(&self.note.to_ne_bytes());
        bytes
    }

    /// The values that the driver has written.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        Self {
            queues: u16::from_ne_bytes(part(bytes, 0)),
            depth: u16::from_ne_bytes(part(bytes, 2)),
            state: u16::from_ne_bytes(part(bytes, 4)),
            max_io_bytes: u32::from_ne_bytes(part(bytes, 8)),
            id: u32::from_ne_bytes(part(bytes, 12)),
            server: i32::from_ne_bytes(part(bytes, 16)),
            flags: u64::from_ne_bytes(part(bytes, 24)),
            note: u64::from_ne_bytes(part(bytes, 32)),
        }
    }
}

fn part<const N: usize>(bytes: &[u8], start: usize) -> [u8; N] {
    bytes[start..start + N].try_into().expect("N bytes")
}

/// A request (`struct ublksrv_io_desc`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UblkDescriptor {
    /// The operation and its flags (`UBLK_IO_OP_`, `UBLK_IO_F_`).
    pub operation: u32,
    /// How many sectors of 512 bytes.
    pub sectors: u32,
    /// The first of them.
    pub start_sector: u64,
}

impl UblkDescriptor {
    /// The flag of an operation whose pages the driver could not register
    /// (`UBLK_IO_F_NEED_REG_BUF`).
    pub const NOT_REGISTERED: u32 = 1 << 17;
}

/// Bytes of a descriptor: the fields above, and an address that the server supplied.
pub(super) const DESCRIPTOR_BYTES: usize = 24;

/// `UBLK_MAX_QUEUE_DEPTH`, by which the driver computes the location of a queue's descriptors.
pub(super) const MAX_DEPTH: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_the_numbers_of_the_header() {
        // As a C compiler gives them, with <linux/ublk_cmd.h> of Linux 6.12.
        let expected = [
            (UblkCommand::GetFeatures, 0x8020_7513),
            (UblkCommand::GetInfo, 0x8020_7502),
            (UblkCommand::Add, 0xc020_7504),
            (UblkCommand::Delete, 0xc020_7505),
            (UblkCommand::DeleteAsync, 0x8020_7514),
            (UblkCommand::Start, 0xc020_7506),
            (UblkCommand::Stop, 0xc020_7507),
            (UblkCommand::SetParameters, 0xc020_7508),
            (UblkCommand::GetParameters, 0x8020_7509),
            (UblkCommand::StartRecovery, 0xc020_7510),
            (UblkCommand::EndRecovery, 0xc020_7511),
            (UblkCommand::UpdateSize, 0xc020_7515),
        ];
        for (command, code) in expected {
            assert_eq!(command.code(), code, "{command:?}");
        }
        assert_eq!((FETCH, COMMIT_AND_FETCH), (0xc010_7520, 0xc010_7521));
    }

    #[test]
    fn a_device_is_what_was_written() {
        let info = UblkInfo {
            queues: 2,
            depth: 128,
            state: ublk_state::QUIESCED,
            max_io_bytes: 512 << 10,
            id: 7,
            server: -1,
            flags: ublk_flag::USER_RECOVERY | 1 << 40,
            note: 0x0123_4567_89ab_cdef,
        };
        assert_eq!(UblkInfo::from_bytes(&info.to_bytes()), info);
    }

    #[test]
    fn fields_are_where_the_driver_reads_them() {
        let bytes = control_bytes(5, 0x1000, 64, 9);
        assert_eq!(bytes[0..4], 5_u32.to_ne_bytes());
        assert_eq!(bytes[4..6], [0xff, 0xff]);
        assert_eq!(bytes[6..8], 64_u16.to_ne_bytes());
        assert_eq!(bytes[8..16], 0x1000_u64.to_ne_bytes());
        assert_eq!(bytes[16..24], 9_u64.to_ne_bytes());
        assert!(bytes[24..].iter().all(|byte| *byte == 0));
        assert_eq!(slot_address(0x1234), 0x0001_1234);
        assert_eq!(data_offset(0, 0), 1 << 31);
        assert_eq!(data_offset(3, 5), (1 << 31) + (3 << 41) + (5 << 25));
        let bytes = queue_bytes(1, 2, -5);
        assert_eq!(bytes[0..4], [1_u16.to_ne_bytes(), 2_u16.to_ne_bytes()].concat());
        assert_eq!(bytes[4..8], (-5_i32).to_ne_bytes());
    }
}
