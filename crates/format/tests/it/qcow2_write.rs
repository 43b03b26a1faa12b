//! Random changes of images of every kind, against a flat model, our own check and QEMU's.

use std::path::Path;

use blockhouse_core::{ByteRange, SyncMode, Unmap};
use blockhouse_format::Intent;
use blockhouse_format::qcow2::{
    Backing, Compression, CreateOptions, OpenOptions, Preallocation, Qcow2, Switch, Version, check,
    create,
};
use blockhouse_sim::SimDisk;
use futures_executor::block_on;
use proptest::prelude::*;

use crate::common::{FileStorage, has_qemu, qemu_check, read, run, unmap, write};

/// The byte that fills the backing file.
const BEHIND: u8 = 9;
const MAX_SIZE: u64 = 6 << 20;

#[derive(Clone, Debug)]
enum Action {
    Write { at: u64, length: u64, value: u8 },
    Zero { at: u64, length: u64, unmap: Unmap },
    Discard { at: u64, length: u64 },
    Flush,
    Reopen,
    Grow { by: u64 },
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let at = 0..MAX_SIZE / 512;
    let length = prop_oneof![4 => 1..40u64, 3 => 40..400u64, 1 => 400..4000u64];
    let place = (at, length).prop_map(|(at, length)| (at * 512, length * 512));
    let unmap = prop_oneof![Just(Unmap::Allowed), Just(Unmap::Forbidden)];
    let action = prop_oneof![
        6 => (place.clone(), 1..=255u8)
            .prop_map(|((at, length), value)| Action::Write { at, length, value }),
        2 => (place.clone(), unmap)
            .prop_map(|((at, length), unmap)| Action::Zero { at, length, unmap }),
        2 => place.prop_map(|(at, length)| Action::Discard { at, length }),
        1 => Just(Action::Flush),
        1 => Just(Action::Reopen),
        1 => (1..2000u64).prop_map(|by| Action::Grow { by: by * 512 }),
    ];
    prop::collection::vec(action, 1..30)
}

fn kinds() -> impl Strategy<Value = CreateOptions> {
    let base = CreateOptions::new(3 << 20);
    let backing = Some(Backing { name: b"base.raw".to_vec(), format: Some("raw".into()) });
    let cluster_size = prop_oneof![Just(512), Just(1024), Just(4096), Just(65_536), Just(2 << 20)];
    let refcount_bits = prop_oneof![Just(1), Just(2), Just(8), Just(16), Just(64)];
    let v3 = (cluster_size.clone(), refcount_bits, any::<(bool, bool, bool, bool)>());
    let v3 = v3.prop_map(move |(cluster_size, refcount_bits, (lazy, extended, backed, full))| {
        let switch = |on| if on { Switch::On } else { Switch::Off };
        CreateOptions {
            cluster_size,
            refcount_bits,
            lazy_refcounts: switch(lazy),
            extended_l2: switch(extended && cluster_size >= 16 << 10),
            backing: if backed { backing.clone() } else { None },
            preallocation: if full && !backed {
                Preallocation::Metadata
            } else {
                Preallocation::Off
            },
            ..base.clone()
        }
    });
    let v2 = (cluster_size, any::<bool>()).prop_map(|(cluster_size, backed)| CreateOptions {
        version: Version::V2,
        cluster_size,
        backing: backed.then(|| Backing { name: b"base.raw".to_vec(), format: None }),
        ..CreateOptions::new(3 << 20)
    });
    prop_oneof![3 => v3, 1 => v2]
}

struct Disk<'a> {
    path: &'a Path,
    image: Option<Qcow2<SimDisk>>,
    model: Vec<u8>,
    behind: u8,
}

impl Disk<'_> {
    fn image(&self) -> &Qcow2<SimDisk> {
        self.image.as_ref().expect("an open image")
    }

    async fn open(&mut self) {
        let storage = FileStorage::open(self.path);
        self.image = Some(Qcow2::open(storage, OpenOptions::default()).await.unwrap());
    }

    /// The part of `[at, at + length)` that is on the disk.
    fn clip(&self, at: u64, length: u64) -> ByteRange {
        let size = self.model.len() as u64;
        ByteRange::between(at.min(size), (at + length).min(size))
    }

    fn model(&mut self, range: ByteRange) -> &mut [u8] {
        &mut self.model[range.offset() as usize..range.end() as usize]
    }

    async fn act(&mut self, action: &Action) {
        match *action {
            Action::Write { at, length, value } => {
                let range = self.clip(at, length);
                let bytes = vec![value; range.length() as usize];
                write(self.image(), range.offset(), &bytes, self.behind).await.unwrap();
                self.model(range).fill(value);
            }
            Action::Zero { at, length, unmap: how } => {
                let range = self.clip(at, length);
                unmap(self.image(), range, Intent::Zero(how), self.behind).await.unwrap();
                self.model(range).fill(0);
            }
            Action::Discard { at, length } => self.discard(self.clip(at, length)).await,
            Action::Flush => self.image().flush(SyncMode::Data).await.unwrap(),
            Action::Reopen => {
                self.image().close().await.unwrap();
                self.open().await;
            }
            Action::Grow { by } => self.grow(by).await,
        }
    }

    async fn discard(&mut self, range: ByteRange) {
        unmap(self.image(), range, Intent::Discard, self.behind).await.unwrap();
        let found = read(self.image(), range, self.behind).await.unwrap();
        for (old, &new) in self.model(range).iter_mut().zip(&found) {
            assert!(new == *old || new == 0, "a discard made {new} of {old}");
            *old = new;
        }
    }

    async fn grow(&mut self, by: u64) {
        let old = self.model.len() as u64;
        let new = (old + by).min(MAX_SIZE);
        self.image().size_change().grow(new).await.unwrap();
        // The bytes behind the old end are the caller's to hide.
        let grown = ByteRange::between(old, new);
        unmap(self.image(), grown, Intent::Zero(Unmap::Allowed), self.behind).await.unwrap();
        self.model.resize(new as usize, 0);
    }

    async fn expect_model(&self) {
        let all = ByteRange::between(0, self.image().size());
        let found = read(self.image(), all, self.behind).await.unwrap();
        assert!(found.len() == self.model.len());
        if let Some(at) = (0..found.len()).find(|&at| found[at] != self.model[at]) {
            panic!("{} instead of {} at offset {at}", found[at], self.model[at]);
        }
    }

    /// QEMU sees the same disk.
    fn expect_qemu_agrees(&self, folder: &Path) {
        let raw = folder.join("expected.raw");
        std::fs::write(&raw, &self.model).unwrap();
        let (ours, raw) = (self.path.display().to_string(), raw.display().to_string());
        run("qemu-img", &["compare", "-q", "-f", "qcow2", "-F", "raw", &ours, &raw]);
    }
}

async fn run_case(folder: &Path, options: &CreateOptions, actions: &[Action], with_qemu: bool) {
    let path = folder.join("image.qcow2");
    std::fs::write(folder.join("base.raw"), vec![BEHIND; MAX_SIZE as usize]).unwrap();
    create(&FileStorage::create(&path), options).await.unwrap();
    let behind = if options.backing.is_some() { BEHIND } else { 0 };
    let model = vec![behind; options.size as usize];
    let mut disk = Disk { path: &path, image: None, model, behind };
    disk.open().await;
    for action in actions {
        disk.act(action).await;
    }
    disk.expect_model().await;
    disk.image().close().await.unwrap();
    let report = check(disk.image()).await.unwrap();
    assert_eq!((report.corruptions, report.leaks), (0, 0), "{:?}", report.problems);
    if with_qemu {
        qemu_check(&path);
        if options.version == Version::V3 || options.backing.is_none() {
            disk.expect_qemu_agrees(folder);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn random_changes_leave_what_a_flat_disk_would_hold(
        options in kinds(),
        actions in actions(),
        ) {
        let folder = tempfile::tempdir().unwrap();
        block_on(run_case(folder.path(), &options, &actions, has_qemu()));
    }
}

#[test]
fn compressed_and_shared_clusters_are_overwritten() {
    if !has_qemu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source.raw");
    let size = 2 << 20;
    let mut model: Vec<u8> = (0..size).map(|at| (at / 3000) as u8).collect();
    std::fs::write(&source, &model).unwrap();
    let (source, path) = (source.display().to_string(), folder.path().join("image.qcow2"));
    let name = path.display().to_string();
    for option in ["compression_type=zlib", "compression_type=zstd,extended_l2=on"] {
        run(
            "qemu-img",
            &["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", option, &source, &name],
        );
        block_on(async {
            let image =
                Qcow2::open(FileStorage::open(&path), OpenOptions::default()).await.unwrap();
            let kinds = [Compression::Zlib, Compression::Zstd];
            assert!(kinds.contains(&image.facts().compression));
            for at in [1000 * 512, 5 * 512, 2000 * 512] {
                write(&image, at, &[7; 3 * 512], 0).await.unwrap();
                model[at as usize..][..3 * 512].fill(7);
            }
            image.close().await.unwrap();
        });
        run("qemu-img", &["snapshot", "-c", "one", &name]);
        block_on(async {
            let image =
                Qcow2::open(FileStorage::open(&path), OpenOptions::default()).await.unwrap();
            for at in [1000 * 512, 1500 * 512, 3 << 18] {
                write(&image, at, &[8; 5 * 512], 0).await.unwrap();
                model[at as usize..][..5 * 512].fill(8);
            }
            image.close().await.unwrap();
            let all = ByteRange::between(0, size);
            assert!(read(&image, all, 0).await.unwrap() == model);
            let report = check(&image).await.unwrap();
            assert_eq!((report.corruptions, report.leaks), (0, 0), "{:?}", report.problems);
        });
        qemu_check(&path);
        run("qemu-img", &["snapshot", "-a", "one", &name]);
        run("qemu-img", &["snapshot", "-d", "one", &name]);
        qemu_check(&path);
        model = std::fs::read(&source).unwrap();
    }
}
