//! Crashes at every point of random workloads on qcow2 images: no image is corrupt, nothing that
//! was acknowledged as durable is lost, no read sees what it must not, no task waits for ever; and
//! what is closed in order has no leaks. All seeds make well over 100,000 crashes, each checked by
//! us, more than 500 of them by `qemu-img` too. `cargo xtask soak` has no limit.

use blockhouse_sim::{SeedSelection, for_seeds};

use crate::crashed::jury::Jury;
use crate::crashed::{Kind, explore_kind};
use crate::qemu;

/// How much all seeds of a kind explore; a run has to explore half of its share of that.
struct Least {
    seeds: u64,
    crashes: u64,
    shown_to_qemu: u64,
}

fn crash_at_every_point(test: &str, kind: Kind, jury: &'static Jury, least: Least) {
    let report = for_seeds(env!("CARGO_PKG_NAME"), test, least.seeds, |seed| {
        explore_kind(kind, seed, jury, |disk| disk)
    });
    eprintln!("{test}: qemu-img was shown {}", jury.asked());
    if SeedSelection::of_this_run() == SeedSelection::Default {
        // Half, because the sums of a quarter of the seeds vary twice as much.
        let part = |of_all: u64| of_all * report.seeds / least.seeds / 2;
        assert!(report.crashes >= part(least.crashes), "only {} crashes", report.crashes);
        let asked = jury.asked();
        assert!(
            !qemu::is_installed() || asked >= part(least.shown_to_qemu),
            "qemu-img was shown only {asked}"
        );
    }
}

#[test]
fn crash_at_every_point_of_a_plain_image() {
    static JURY: Jury = Jury::for_one_in(150);
    let least = Least { seeds: 900, crashes: 35_000, shown_to_qemu: 180 };
    crash_at_every_point("crash_at_every_point_of_a_plain_image", Kind::Plain, &JURY, least);
}

#[test]
fn crash_at_every_point_of_an_old_image() {
    static JURY: Jury = Jury::for_one_in(150);
    let least = Least { seeds: 300, crashes: 10_000, shown_to_qemu: 50 };
    crash_at_every_point("crash_at_every_point_of_an_old_image", Kind::Old, &JURY, least);
}

#[test]
fn crash_at_every_point_with_lazy_refcounts() {
    static JURY: Jury = Jury::for_one_in(150);
    let least = Least { seeds: 600, crashes: 25_000, shown_to_qemu: 120 };
    crash_at_every_point("crash_at_every_point_with_lazy_refcounts", Kind::Lazy, &JURY, least);
}

#[test]
fn crash_at_every_point_over_a_backing_file() {
    static JURY: Jury = Jury::for_one_in(150);
    let least = Least { seeds: 700, crashes: 25_000, shown_to_qemu: 120 };
    crash_at_every_point("crash_at_every_point_over_a_backing_file", Kind::Backed, &JURY, least);
}

#[test]
fn crash_at_every_point_of_an_old_image_over_a_backing_file() {
    static JURY: Jury = Jury::for_one_in(150);
    let least = Least { seeds: 200, crashes: 6_000, shown_to_qemu: 25 };
    let test = "crash_at_every_point_of_an_old_image_over_a_backing_file";
    crash_at_every_point(test, Kind::OldBacked, &JURY, least);
}

#[test]
fn crash_at_every_point_with_subclusters() {
    static JURY: Jury = Jury::for_one_in(100);
    let least = Least { seeds: 300, crashes: 10_000, shown_to_qemu: 60 };
    crash_at_every_point("crash_at_every_point_with_subclusters", Kind::Subclusters, &JURY, least);
}

#[test]
fn crash_at_every_point_with_bitmaps() {
    static JURY: Jury = Jury::for_one_in(150);
    let least = Least { seeds: 600, crashes: 25_000, shown_to_qemu: 120 };
    crash_at_every_point("crash_at_every_point_with_bitmaps", Kind::Bitmaps, &JURY, least);
}

#[test]
fn crash_at_every_point_with_bitmaps_and_lazy_refcounts() {
    static JURY: Jury = Jury::for_one_in(150);
    let least = Least { seeds: 300, crashes: 10_000, shown_to_qemu: 60 };
    let test = "crash_at_every_point_with_bitmaps_and_lazy_refcounts";
    crash_at_every_point(test, Kind::LazyBitmaps, &JURY, least);
}

#[test]
fn crash_at_every_point_with_a_data_file() {
    static JURY: Jury = Jury::for_one_in(150);
    let least = Least { seeds: 400, crashes: 15_000, shown_to_qemu: 60 };
    crash_at_every_point("crash_at_every_point_with_a_data_file", Kind::DataFile, &JURY, least);
}

#[test]
fn crash_at_every_point_with_a_raw_data_file() {
    static JURY: Jury = Jury::for_one_in(150);
    let least = Least { seeds: 300, crashes: 10_000, shown_to_qemu: 50 };
    let test = "crash_at_every_point_with_a_raw_data_file";
    crash_at_every_point(test, Kind::RawDataFile, &JURY, least);
}

/// QEMU demands more stripes of a key slot than fit here, so it is not asked.
#[test]
fn crash_at_every_point_of_an_encrypted_image() {
    static JURY: Jury = Jury::for_one_in(u32::MAX);
    let least = Least { seeds: 400, crashes: 15_000, shown_to_qemu: 0 };
    let test = "crash_at_every_point_of_an_encrypted_image";
    crash_at_every_point(test, Kind::Encrypted, &JURY, least);
}

#[test]
fn crash_at_every_point_of_a_raw_image_with_bitmaps() {
    static JURY: Jury = Jury::for_one_in(150);
    let least = Least { seeds: 200, crashes: 6_000, shown_to_qemu: 25 };
    let test = "crash_at_every_point_of_a_raw_image_with_bitmaps";
    crash_at_every_point(test, Kind::RawBitmaps, &JURY, least);
}
