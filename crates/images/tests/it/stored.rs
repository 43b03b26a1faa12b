//! A raw disk and its file on the host: sizes, and space.

use std::os::unix::fs::MetadataExt;

use blockhouse_core::{Buffer, Durability, ErrorKind, Request};
use blockhouse_disk::{Disk, Options};
use blockhouse_engine::{EngineChoice, EventLoop, HostFile, OpenMode, PageCache};
use blockhouse_format::{BitmapAction, NewBitmap};

#[test]
fn a_hole_takes_no_space() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(64 << 20).unwrap();
    EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
        let storage = HostFile::open(file.path(), OpenMode::ReadWrite, PageCache::Used);
        let disk = Disk::raw(storage.unwrap().into(), Options::default()).unwrap();
        assert!(disk.image().allocated_bytes().unwrap().unwrap() < 1 << 20);
        std::fs::write(file.path(), vec![1; 4 << 20]).unwrap();
        let blocks = file.as_file().metadata().unwrap().blocks();
        assert!(blocks > 0);
        assert_eq!(disk.image().allocated_bytes().unwrap(), Some(blocks * 512));
    });
}

#[test]
fn a_disk_follows_its_file() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
        let storage = HostFile::open(file.path(), OpenMode::ReadWrite, PageCache::Used).unwrap();
        let disk = Disk::raw(storage.into(), Options::default()).unwrap();
        let new = NewBitmap { name: "b".into(), granularity: Some(512 << 10), is_enabled: true };
        disk.bitmaps().add_transient(&new).await.unwrap();
        assert_eq!(disk.refresh_size(false).await.unwrap(), None);
        file.as_file().set_len(3 << 20).unwrap();
        let refused = disk.refresh_size(true).await.unwrap_err();
        assert_eq!((refused.kind(), disk.size()), (ErrorKind::InvalidInput, 1 << 20));
        assert_eq!(disk.refresh_size(false).await.unwrap(), Some(3 << 20));
        assert_eq!(disk.bitmaps().dirty_bytes("b").await.unwrap(), 2 << 20);
        disk.bitmaps().change("b", BitmapAction::Clear).await.unwrap();
        let from = Buffer::new(512).lend();
        let write = Request::Write { offset: 2 << 20, from, durability: Durability::None };
        disk.submit(write).await.unwrap();
        assert_eq!(disk.bitmaps().dirty_bytes("b").await.unwrap(), 512 << 10);
        assert_eq!(disk.size(), 3 << 20);
        file.as_file().set_len(1 << 20).unwrap();
        assert!(disk.refresh_size(false).await.is_err());
        assert_eq!(disk.size(), 3 << 20);
        file.as_file().set_len((3 << 20) + 1).unwrap();
        assert_eq!(disk.refresh_size(false).await.unwrap(), Some((3 << 20) + 512));
        assert_eq!(disk.refresh_size(false).await.unwrap(), None);
    });
}
