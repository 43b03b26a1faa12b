//! Zero detection: writes of zeros become zero writes where that is asked for, for raw and qcow2
//! alike.

use blockhouse_core::{Buffer, Durability, Request, Unmap};
use blockhouse_disk::{DetectZeroes, Discard, Disk, ImageFormat, Options};
use blockhouse_format::qcow2::{self, CreateOptions};
use blockhouse_sim::{Config, Operation, OperationKind, Sim, SimDisk};

use crate::common::{Rig, steady};

const LENGTH: usize = 8192;

/// The operations at the storage of a raw disk for a write with one byte of that value.
fn operations_of(options: Options, byte: u8, durability: Durability) -> Vec<Operation> {
    let rig = Rig::new(steady(), 1 << 16, options);
    let mut buffer = Buffer::new(LENGTH);
    buffer.bytes_mut()[5000] = byte;
    let from = buffer.lend();
    rig.submit(Request::Write { offset: 4096, from, durability }).unwrap();
    let log = rig.log();
    let mut expected = vec![0; LENGTH];
    expected[5000] = byte;
    assert_eq!(rig.read(4096, LENGTH), expected);
    log
}

fn detecting(detect_zeroes: DetectZeroes) -> Options {
    Options { detect_zeroes, ..Options::default() }
}

fn is_zero_write(operation: &Operation, wanted: Unmap) -> bool {
    matches!(operation, Operation::WriteZeroes(_, unmap) if *unmap == wanted)
}

#[test]
fn zeros_become_zero_writes_where_that_is_asked_for() {
    let log = |detect, byte| operations_of(detecting(detect), byte, Durability::None);
    for detect in [DetectZeroes::Off, DetectZeroes::On, DetectZeroes::Unmap] {
        assert_eq!(log(detect, 1)[0].kind(), OperationKind::Write, "{detect:?}");
    }
    assert_eq!(log(DetectZeroes::Off, 0)[0].kind(), OperationKind::Write);
    let on = log(DetectZeroes::On, 0);
    assert!(on.len() == 1 && is_zero_write(&on[0], Unmap::Forbidden), "{on:?}");
    let unmap = log(DetectZeroes::Unmap, 0);
    assert!(unmap.len() == 1 && is_zero_write(&unmap[0], Unmap::Allowed), "{unmap:?}");
}

#[test]
fn detected_zeros_are_as_durable_as_the_write() {
    let log = operations_of(detecting(DetectZeroes::On), 0, Durability::Data);
    assert_eq!(log.last().unwrap().kind(), OperationKind::Flush, "{log:?}");
}

#[test]
fn space_is_kept_where_discards_are_ignored() {
    let options = Options { discard: Discard::Ignore, ..detecting(DetectZeroes::Unmap) };
    let log = operations_of(options, 0, Durability::None);
    assert!(is_zero_write(&log[0], Unmap::Forbidden), "{log:?}");
}

#[test]
fn zeros_take_no_space_of_a_qcow2_image_but_a_table() {
    let sim = Sim::new(1);
    let storage = SimDisk::new(&sim, Config::default(), Vec::new());
    let file = storage.clone();
    let grown = sim.block_on(async move {
        qcow2::create(&file, &CreateOptions::new(1 << 20)).await.unwrap();
        let before = file.content().len();
        let disk = Disk::open(file.clone(), ImageFormat::Qcow2, detecting(DetectZeroes::On))
            .await
            .unwrap();
        for offset in (0..1 << 20).step_by(1 << 16) {
            let (from, durability) = (Buffer::new(1 << 16).lend(), Durability::None);
            disk.submit(Request::Write { offset, from, durability }).await.unwrap();
        }
        disk.close().await.unwrap();
        file.content().len() - before
    });
    assert_eq!(grown, 1 << 16, "the table of the marks that they read as zeros");
}
