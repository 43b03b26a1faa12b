//! A QEMU machine with a vhost-user-blk disk, and no guest: the test acts as the guest's driver
//! over QEMU's qtest protocol, so requests may be anywhere in the machine's memory.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::qmp::{Qmp, accept_from};
use crate::{Scratch, eventually, tool};

const LONG: Duration = Duration::from_secs(60);
/// The slot of the disk on the PCI bus.
const SLOT: u32 = 3;
/// The address that the test gives to the device's registers: below 4 GiB, in the gap after the
/// machine's low memory.
const REGISTERS: u64 = 0xe000_0000;
/// Fields of `struct virtio_pci_common_cfg`, which is at the start of QEMU's registers.
const FEATURE_SELECT: u64 = REGISTERS + 8;
const FEATURES: u64 = REGISTERS + 0xc;
const STATUS: u64 = REGISTERS + 0x14;
const QUEUE_SELECT: u64 = REGISTERS + 0x16;
const QUEUE_SIZE: u64 = REGISTERS + 0x18;
const QUEUE_ENABLE: u64 = REGISTERS + 0x1c;
const QUEUE_RINGS: u64 = REGISTERS + 0x20;
/// The address that notifies queue 0; those of the next queues follow, 4 bytes each.
const NOTIFY: u64 = REGISTERS + 0x3000;
/// VIRTIO_BLK_F_MQ, and VIRTIO_F_VERSION_1 of the second half.
const WANTED_FEATURES: [u32; 2] = [1 << 12, 1];
/// Descriptors of a queue, three for each request.
const DESCRIPTORS: u16 = 64;
/// The first I/O port of ACPI's memory hotplug.
const MEMORY_PORT: u32 = 0xa00;

/// VIRTIO_BLK_T_IN
pub const READ: u32 = 0;
/// VIRTIO_BLK_T_OUT
pub const WRITE: u32 = 1;

/// A QEMU machine as the module describes; killed on drop.
pub struct QemuMachine {
    process: Child,
    qtest: BufReader<UnixStream>,
    /// The monitor.
    pub qmp: Qmp,
}

/// A queue whose rings are at an address of the machine.
pub struct QemuQueue {
    index: u16,
    rings: u64,
    sent: u16,
}

/// A request to be sent.
#[derive(Clone, Copy, Debug)]
pub struct QemuRequest {
    /// [`READ`] or [`WRITE`].
    pub kind: u32,
    /// The first sector of the disk.
    pub sector: u64,
    /// The address of the data, of the header after it, and of the status after that.
    pub data: u64,
    /// Bytes of data.
    pub length: u32,
}

impl QemuMachine {
    /// Starts a machine. `memory` is the value of `-object` for a backend called `ram`, `disk` the
    /// socket of the disk's server.
    ///
    /// # Panics
    /// When QEMU does not start.
    #[track_caller]
    pub fn start(scratch: &Scratch, memory: &str, bytes: u64, disk: &Path, queues: u16) -> Self {
        let [qtest, qmp] = ["qtest", "qmp"].map(|name| scratch.socket(name));
        let [listener, qmp_listener] =
            [&qtest, &qmp].map(|socket| UnixListener::bind(socket).expect("a new socket"));
        let mut qemu = tool("qemu-system-x86_64");
        qemu.args(["-accel", "tcg", "-nodefaults", "-display", "none", "-object", memory]);
        qemu.arg("-bios").arg(firmware(scratch));
        qemu.args(["-machine", "pc,memory-backend=ram", "-qtest-log", "/dev/null"]);
        qemu.arg("-m").arg(format!("size={bytes}b,slots=2,maxmem=1G"));
        qemu.arg("-qtest").arg(format!("unix:{}", qtest.display()));
        qemu.arg("-qmp").arg(format!("unix:{}", qmp.display()));
        qemu.arg("-chardev").arg(format!("socket,id=c,path={}", disk.display()));
        let device = "vhost-user-blk-pci,chardev=c,id=disk,disable-legacy=on";
        qemu.arg("-device").arg(format!("{device},num-queues={queues},addr={SLOT}"));
        let mut process = qemu.stdin(Stdio::null()).spawn().expect("QEMU");
        let monitor = accept_from(&qmp_listener, &mut process);
        let qtest = accept_from(&listener, &mut process);
        qtest.set_read_timeout(Some(LONG)).expect("a socket");
        let (qtest, qmp) = (BufReader::new(qtest), Qmp::over(monitor));
        let mut machine = Self { process, qtest, qmp };
        // The device's registers, and its use of memory.
        for (register, value) in [(0x20, REGISTERS as u32), (0x24, 0), (0x04, 6)] {
            machine.ask(&format!("outl 0xcf8 {:#x}", 1 << 31 | SLOT << 11 | register));
            machine.ask(&format!("outl 0xcfc {value:#x}"));
        }
        machine
    }

    /// Resets the device, and sets up queues whose rings are at these addresses.
    ///
    /// # Panics
    /// When the device refuses them.
    #[track_caller]
    pub fn set_queues(&mut self, rings: &[u64]) -> Vec<QemuQueue> {
        self.ask(&format!("writeb {STATUS:#x} 0"));
        self.ask(&format!("writeb {STATUS:#x} 3"));
        for (select, features) in WANTED_FEATURES.iter().enumerate() {
            self.ask(&format!("writel {FEATURE_SELECT:#x} {select}"));
            self.ask(&format!("writel {FEATURES:#x} {features:#x}"));
        }
        self.ask(&format!("writeb {STATUS:#x} 11"));
        for (index, rings) in rings.iter().enumerate() {
            self.write(*rings, &[0; 0x3000]);
            self.ask(&format!("writew {QUEUE_SELECT:#x} {index}"));
            self.ask(&format!("writew {QUEUE_SIZE:#x} {DESCRIPTORS}"));
            for part in 0..3 {
                let (register, ring) = (QUEUE_RINGS + part * 8, rings + part * 0x1000);
                self.ask(&format!("writel {register:#x} {:#x}", ring as u32));
                self.ask(&format!("writel {:#x} {:#x}", register + 4, ring >> 32));
            }
            self.ask(&format!("writew {QUEUE_ENABLE:#x} 1"));
        }
        self.ask(&format!("writeb {STATUS:#x} 15"));
        let status = self.ask(&format!("readb {STATUS:#x}"));
        assert!(status.ends_with("00f"), "the device is ready: {status}");
        let queue = |(index, rings): (usize, &u64)| {
            let index = u16::try_from(index).expect("few queues");
            QemuQueue { index, rings: *rings, sent: 0 }
        };
        rings.iter().enumerate().map(queue).collect()
    }

    /// Sends requests without waiting for them. Between two calls of [`finish`](Self::finish) there
    /// may be no more requests than the queue holds.
    pub fn send(&mut self, queue: &mut QemuQueue, requests: &[QemuRequest]) {
        for (slot, request) in requests.iter().enumerate() {
            let first = u16::try_from(3 * slot).expect("few requests");
            assert!(first + 2 < DESCRIPTORS, "more requests than descriptors");
            let header = request.header();
            let bytes = [request.kind.to_le_bytes(), [0; 4]].concat();
            self.write(header, &[&bytes[..], &request.sector.to_le_bytes(), &[0xff]].concat());
            let is_read = u16::from(request.kind == READ);
            let mut descriptors = Vec::new();
            for (address, length, flags, next) in [
                (header, 16, 1, first + 1),
                (request.data, request.length, 1 | is_read << 1, first + 2),
                (header + 16, 1, 2, 0),
            ] {
                descriptors.extend(address.to_le_bytes());
                descriptors.extend(u32::to_le_bytes(length));
                descriptors.extend([u16::to_le_bytes(flags), next.to_le_bytes()].concat());
            }
            self.write(queue.rings + 16 * u64::from(first), &descriptors);
            let entry = queue.rings + 0x1004 + 2 * u64::from(queue.sent % DESCRIPTORS);
            self.write(entry, &first.to_le_bytes());
            queue.sent += 1;
        }
        self.write(queue.rings + 0x1002, &queue.sent.to_le_bytes());
        let notify = NOTIFY + 4 * u64::from(queue.index);
        self.ask(&format!("writew {notify:#x} {}", queue.index));
    }

    /// Waits until the device has completed all requests.
    ///
    /// # Panics
    /// When it does not complete them, or a request has failed.
    #[track_caller]
    pub fn finish(&mut self, queue: &QemuQueue, requests: &[QemuRequest]) {
        let used = queue.rings + 0x2002;
        let is_done = || self.read(used, 2) == queue.sent.to_le_bytes();
        assert!(eventually(LONG, is_done), "queue {} does not answer", queue.index);
        for request in requests {
            let status = self.read(request.header() + 16, 1);
            assert_eq!(status, [0], "{request:?}");
        }
    }

    /// Ejects the memory of a slot, as a guest does on request.
    pub fn eject_memory(&mut self, slot: u32) {
        self.ask(&format!("outl {MEMORY_PORT:#x} {slot}"));
        self.ask(&format!("outb {:#x} 8", MEMORY_PORT + 0x14));
    }

    /// Writes to the machine's memory.
    pub fn write(&mut self, address: u64, bytes: &[u8]) {
        let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        self.ask(&format!("write {address:#x} {:#x} 0x{digits}", bytes.len()));
    }

    /// Reads the machine's memory.
    pub fn read(&mut self, address: u64, length: usize) -> Vec<u8> {
        let answer = self.ask(&format!("read {address:#x} {length:#x}"));
        let digits = answer.strip_prefix("0x").expect("bytes");
        let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).expect("a byte");
        (0..digits.len()).step_by(2).map(byte).collect()
    }

    /// The answer to a line of the protocol.
    #[track_caller]
    fn ask(&mut self, line: &str) -> String {
        self.qtest.get_mut().write_all(format!("{line}\n").as_bytes()).expect("QEMU runs");
        let mut answer = String::new();
        self.qtest.read_line(&mut answer).expect("QEMU answers");
        let answer = answer.trim_end();
        let value = answer.strip_prefix("OK").unwrap_or_else(|| panic!("{answer:?}"));
        value.trim().to_owned()
    }
}

/// Firmware that stops the processor, so that nothing but the test uses the machine.
fn firmware(scratch: &Scratch) -> PathBuf {
    // cli; hlt; and a jump back, because a non-maskable interrupt ends hlt.
    const HALT: [u8; 4] = [0xfa, 0xf4, 0xeb, 0xfd];
    let mut bytes = vec![0; 64 << 10];
    let start = bytes.len() - 16;
    bytes[start..start + HALT.len()].copy_from_slice(&HALT);
    let path = scratch.path("firmware");
    std::fs::write(&path, bytes).expect("room");
    path
}

impl QemuRequest {
    fn header(&self) -> u64 {
        self.data + u64::from(self.length)
    }
}

impl Drop for QemuMachine {
    fn drop(&mut self) {
        // The process may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
