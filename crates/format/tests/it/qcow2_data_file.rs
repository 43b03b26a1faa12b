//! Images whose data file is a device.

use blockhouse_core::{ByteRange, Durability, ErrorKind, ExtentState, Storage, ToolProgress};
use blockhouse_format::Intent;
use blockhouse_format::qcow2::{CreateOptions, DataFile, OpenOptions, Qcow2, Switch, create_with};
use blockhouse_sim::{Config, Sim, SimDisk, Size};

const SIZE: u64 = 1 << 20;

/// Where the header has the disk's size.
const SIZE_FIELD: std::ops::Range<usize> = 24..32;

#[test]
fn a_disk_whose_data_file_cannot_be_cut_keeps_its_size_and_its_data() {
    for raw in [Switch::Off, Switch::On] {
        let sim = Sim::new(1);
        let disk = SimDisk::new(&sim, Config::default(), Vec::new());
        let fixed = Config { size: Size::Fixed, ..Config::default() };
        let device = SimDisk::new(&sim, fixed, vec![0; SIZE as usize]);
        let (made, data) = (disk.clone(), device.clone());
        sim.block_on(async move {
            let data_file = Some(DataFile { name: b"device".to_vec(), raw });
            let options = CreateOptions { data_file, ..CreateOptions::new(SIZE) };
            create_with(&made, Some(&data), &options, &ToolProgress::default()).await.unwrap();
            let image = Qcow2::open(made.clone(), OpenOptions::default()).await.unwrap();
            let image = image.with_data(data).unwrap();
            let last = ByteRange::between(SIZE - 65_536, SIZE);
            let extent = image.map(last, Intent::Write).await.unwrap();
            image.link(extent, Durability::None).await.unwrap();
            let error = image.size_change().shrink(SIZE / 2).await.expect_err("a fixed size");
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert_eq!(image.size(), SIZE);
            image.close().await.unwrap();
            let extent = image.map(last, Intent::Read).await.unwrap();
            assert_eq!(extent.state, ExtentState::Mapped { host: last.offset() });
        });
        assert_eq!(disk.content()[SIZE_FIELD], SIZE.to_be_bytes());
        assert_eq!(device.size(), SIZE);
    }
}

#[test]
fn a_disk_shrinks_to_a_device_that_has_its_new_size_already() {
    let sim = Sim::new(1);
    let disk = SimDisk::new(&sim, Config::default(), Vec::new());
    let fixed = Config { size: Size::Fixed, ..Config::default() };
    let device = |size: u64| SimDisk::new(&sim, fixed.clone(), vec![0; size as usize]);
    let (made, data, smaller) = (disk.clone(), device(SIZE), device(SIZE / 2));
    sim.block_on(async move {
        let data_file = Some(DataFile { name: b"device".to_vec(), raw: Switch::Off });
        let options = CreateOptions { data_file, ..CreateOptions::new(SIZE) };
        create_with(&made, Some(&data), &options, &ToolProgress::default()).await.unwrap();
        let image = Qcow2::open(made, OpenOptions::default()).await.unwrap();
        let image = image.with_data(smaller).unwrap();
        image.size_change().shrink(SIZE / 2).await.unwrap();
        assert_eq!(image.size(), SIZE / 2);
    });
    assert_eq!(disk.content()[SIZE_FIELD], (SIZE / 2).to_be_bytes());
}
