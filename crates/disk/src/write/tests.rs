//! Requests of several extents. A raw image has one extent, so the tests make more by hand.

use std::rc::Rc;

use blockhouse_core::{Buffer, Durability, ErrorKind, Extent, Fallback, SyncMode, Unmap, errno};
use blockhouse_format::Format;
use blockhouse_sim::{Config, Fault, Latency, Operation, OperationKind, Sim, SimDisk};

use super::*;
use crate::durability::{FlushTracker, RequiredSync};
use crate::layer::Reader;
use crate::options::{Access, FlushPolicy};

const SECTOR: u64 = 512;

struct Rig {
    sim: Sim,
    storage: SimDisk,
    writer: Rc<Writer<SimDisk>>,
}

/// An image whose sector n is full of n.
fn rig() -> Rig {
    let sim = Sim::new(1);
    let content = (0..64_u8).flat_map(|sector| [sector; SECTOR as usize]).collect();
    let config = Config { latency: Latency::fixed(10, 100), ..Config::default() };
    let storage = SimDisk::new(&sim, config, content);
    let image =
        Format::raw(FlushTracker::new(storage.clone(), FlushPolicy::Honor, Access::ReadWrite))
            .unwrap();
    let writer = Rc::new(Writer::new(Arc::new(Layer::new(image))));
    Rig { sim, storage, writer }
}

/// Extents of one sector each, one after the other from the start of the disk.
fn sectors(states: &[(ExtentState, ExtentFlags)]) -> Vec<Extent> {
    let extent = |(index, &(state, flags)): (usize, &(ExtentState, ExtentFlags))| {
        let start = index as u64 * SECTOR;
        let guest = ByteRange::between(start, start + SECTOR);
        Extent { guest, alloc_range: guest, state, flags }
    };
    states.iter().enumerate().map(extent).collect()
}

/// The state and flags of an extent that is mapped to this sector of the storage.
fn mapped(sector: u64) -> (ExtentState, ExtentFlags) {
    (ExtentState::Mapped { host: sector * SECTOR }, ExtentFlags::empty())
}

fn read(rig: &Rig, extents: Vec<Extent>) -> Result<Vec<u8>> {
    let (writer, mut buffer) =
        (Rc::clone(&rig.writer), Buffer::new(extents.len() * SECTOR as usize));
    let into = buffer.lend();
    let extents = stream::iter(extents).map(|extent| Ok((extent, None)));
    rig.sim.block_on(async move {
        writer.layer().read_extents(extents, into, &Cell::new(false), Reader::Read).await
    })?;
    Ok(buffer.bytes().chunks(SECTOR as usize).map(|sector| sector[0]).collect())
}

fn begin_sync(writer: &Writer<SimDisk>, asked: Durability) -> RequestSync<'_, SimDisk> {
    RequestSync::new(writer.layer().format(), asked)
}

/// Writes 101, 102, ... to the extents; returns the sync that is required afterwards.
fn write(rig: &Rig, extents: Vec<Extent>, durability: Durability) -> Result<RequiredSync> {
    let writer = Rc::clone(&rig.writer);
    let mut buffer = Buffer::new(extents.len() * SECTOR as usize);
    for (index, sector) in buffer.bytes_mut().chunks_mut(SECTOR as usize).enumerate() {
        sector.fill(101 + index as u8);
    }
    let from = buffer.lend();
    rig.sim.block_on(async move {
        let prepare = |extent| PreparedExtent::new(writer.layer().format(), extent);
        let prepared = extents.into_iter().map(prepare).collect();
        let nothing = ByteRange::between(0, 0);
        let sync = begin_sync(&writer, durability);
        writer.write_extents(prepared, nothing, from, &sync).await?;
        Ok(sync.required())
    })
}

#[test]
fn a_read_puts_each_extent_in_its_place_and_waits_once() {
    let rig = rig();
    let nothing = |state| (state, ExtentFlags::empty());
    let extents = sectors(&[
        mapped(9),
        nothing(ExtentState::Zero),
        mapped(3),
        nothing(ExtentState::Hole),
        mapped(63),
    ]);
    assert_eq!(read(&rig, extents).unwrap(), [9, 0, 3, 0, 63]);
    assert_eq!(rig.sim.clock().now().as_micros(), 10, "the reads went down together");
}

#[test]
fn a_write_goes_where_each_extent_is() {
    let rig = rig();
    let required = write(&rig, sectors(&[mapped(7), mapped(2), mapped(40)]), Durability::Data);
    assert_eq!(required.unwrap(), RequiredSync::None);
    let content = rig.storage.content();
    let first_of = |sector: usize| content[sector * SECTOR as usize];
    assert_eq!([first_of(7), first_of(2), first_of(40)], [101, 102, 103]);
    let log = rig.storage.take_log();
    let is_fua = |operation: &Operation| operation.kind() == OperationKind::DurableWrite;
    assert!(log.len() == 3 && log.iter().all(is_fua), "{log:?}");
}

#[test]
fn one_extent_that_is_no_pure_overwrite_makes_all_writes_plain_and_requires_a_flush() {
    for flags in [ExtentFlags::NEW, ExtentFlags::SHARED, ExtentFlags::DIRTY] {
        let rig = rig();
        let extents = sectors(&[mapped(1), (ExtentState::Mapped { host: 0 }, flags)]);
        let required = write(&rig, extents, Durability::Data).unwrap();
        assert_eq!(required, RequiredSync::Flush(SyncMode::Data));
        let log = rig.storage.take_log();
        assert!(log.iter().all(|one| one.kind() == OperationKind::Write), "{log:?}");
    }
}

#[test]
fn all_operations_of_a_failed_request_are_waited_for() {
    let rig = rig();
    rig.storage.fail(Fault::nth(0, errno::EIO));
    let error = write(&rig, sectors(&[mapped(1), mapped(2), mapped(3)]), Durability::None);
    assert_eq!(error.unwrap_err().errno(), errno::EIO);
    assert_eq!(rig.storage.counts(), (3, 3));
}

#[test]
fn more_extents_than_go_down_together_all_go_down() {
    let rig = rig();
    let count = MAX_IN_FLIGHT as u64 * 2 + 3;
    let extents = sectors(&(0..count).map(mapped).collect::<Vec<_>>());
    assert_eq!(read(&rig, extents).unwrap(), (0..count as u8).collect::<Vec<_>>());
    assert_eq!(rig.sim.clock().now().as_micros(), 30);
}

#[test]
fn an_extent_without_a_place_for_the_data_is_called_corrupt() {
    let rig = rig();
    let compressed = ExtentState::Compressed { host: 0, length: 100 };
    let kinds = [ErrorKind::Corrupt, ErrorKind::Unsupported];
    for (state, kind) in [compressed, ExtentState::Backing].into_iter().zip(kinds) {
        let error = read(&rig, sectors(&[mapped(0), (state, ExtentFlags::empty())])).unwrap_err();
        assert_eq!(error.kind(), kind);
    }
    for state in [compressed, ExtentState::Backing, ExtentState::Zero, ExtentState::Hole] {
        let extents = sectors(&[(state, ExtentFlags::empty())]);
        assert_eq!(write(&rig, extents, Durability::None).unwrap_err().kind(), ErrorKind::Corrupt);
    }
}

#[test]
fn zeros_are_written_only_where_something_is_mapped() {
    let rig = rig();
    let states = [mapped(5), (ExtentState::Zero, ExtentFlags::NEW), mapped(6)];
    let writer = Rc::clone(&rig.writer);
    let how =
        ZeroOptions { unmap: Unmap::Allowed, fallback: Fallback::Allowed, writes_small: false };
    rig.sim.block_on(async move {
        for extent in sectors(&states) {
            let prepared = PreparedExtent::new(writer.layer().format(), extent);
            let sync = begin_sync(&writer, Durability::Data);
            writer.zero_extent(prepared, how, &sync).await.unwrap();
            assert_eq!(
                sync.required(),
                match extent.state {
                    ExtentState::Mapped { .. } => {
                        RequiredSync::Flush(SyncMode::Data)
                    }
                    _ => RequiredSync::Metadata,
                }
            );
        }
    });
    let zeroed = |sector: u64| {
        let range = ByteRange::between(sector * SECTOR, (sector + 1) * SECTOR);
        Operation::WriteZeroes(range, Unmap::Allowed)
    };
    assert_eq!(rig.storage.take_log(), [zeroed(5), zeroed(6)]);
}

#[test]
fn new_space_gets_its_old_surroundings_in_the_same_write() {
    let rig = rig();
    // Sector 2 of the guest is written to the new sectors 40 to 43, which get sectors 1 to 4.
    let guest = ByteRange::between(2 * SECTOR, 3 * SECTOR);
    let whole = ByteRange::between(SECTOR, 5 * SECTOR);
    let state = ExtentState::Mapped { host: 41 * SECTOR };
    let extent = Extent { guest, alloc_range: whole, state, flags: ExtentFlags::NEW };
    let required = write(&rig, vec![extent], Durability::Data).unwrap();
    assert_eq!(required, RequiredSync::DataAndMetadata);
    let content = rig.storage.content();
    let first_of = |sector: usize| content[sector * SECTOR as usize];
    assert_eq!([39, 40, 41, 42, 43, 44].map(first_of), [39, 1, 101, 3, 4, 44]);
    let is_write = |one: &&Operation| one.kind() == OperationKind::Write;
    assert_eq!(rig.storage.take_log().iter().filter(is_write).count(), 1);
}

#[test]
fn zeros_in_new_space_leave_what_is_around_them() {
    let rig = rig();
    let guest = ByteRange::between(2 * SECTOR, 3 * SECTOR);
    let whole = ByteRange::between(SECTOR, 5 * SECTOR);
    let state = ExtentState::Mapped { host: 41 * SECTOR };
    let extent = Extent { guest, alloc_range: whole, state, flags: ExtentFlags::NEW };
    let writer = Rc::clone(&rig.writer);
    let how =
        ZeroOptions { unmap: Unmap::Forbidden, fallback: Fallback::Allowed, writes_small: false };
    rig.sim.block_on(async move {
        let prepared = PreparedExtent::new(writer.layer().format(), extent);
        let sync = begin_sync(&writer, Durability::None);
        writer.zero_extent(prepared, how, &sync).await.unwrap();
        assert_eq!(sync.required(), RequiredSync::None);
    });
    let content = rig.storage.content();
    let first_of = |sector: usize| content[sector * SECTOR as usize];
    assert_eq!([39, 40, 41, 42, 43, 44].map(first_of), [39, 1, 0, 3, 4, 44]);
}

#[test]
fn a_write_whose_surroundings_cannot_be_read_writes_nothing() {
    let rig = rig();
    rig.storage.fail(Fault::nth(0, errno::EIO));
    let guest = ByteRange::between(2 * SECTOR, 3 * SECTOR);
    let whole = ByteRange::between(2 * SECTOR, 5 * SECTOR);
    let state = ExtentState::Mapped { host: 41 * SECTOR };
    let extent = Extent { guest, alloc_range: whole, state, flags: ExtentFlags::NEW };
    let error = write(&rig, vec![extent], Durability::None).unwrap_err();
    assert_eq!((error.errno(), rig.storage.counts()), (errno::EIO, (1, 1)));
}

#[test]
fn no_more_extents_are_known_than_go_down_together() {
    let rig = rig();
    let (writer, storage) = (Rc::clone(&rig.writer), rig.storage.clone());
    let mut memory = Buffer::new(2048 * SECTOR as usize);
    let into = memory.lend();
    rig.sim.block_on(async move {
        let pulled = Cell::new(0);
        let extents = stream::iter(0..2048).map(|number| {
            pulled.set(pulled.get() + 1);
            let (_, ended) = storage.counts();
            let known = pulled.get() - ended;
            assert!(known <= MAX_IN_FLIGHT as u64 + 1, "{known}");
            let guest = ByteRange::between(number * SECTOR, (number + 1) * SECTOR);
            let (state, flags) = mapped(7);
            Ok((Extent { guest, alloc_range: guest, state, flags }, None))
        });
        let stopped = Cell::new(false);
        writer.layer().read_extents(extents, into, &stopped, Reader::Read).await.unwrap();
    });
    assert!(memory.bytes().iter().all(|&byte| byte == 7));
}
