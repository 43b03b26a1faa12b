//! `convert` and `compare` beside qemu-img: each program finds the images of the other equal and
//! without errors, and no image is lost when something fails.

use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use blockhouse_tests::{
    LoopDevice, Scratch, blockhouse,
    image_tool::{command, new_image, qemu_img, qemu_io, str},
    need, random_bytes, require, run, seeded, tool,
};
use fastrand::Rng;
use serde_json::Value;

const MIB: u64 = 1 << 20;
/// Bytes of the disk: not a multiple of most cluster sizes, nor of a block.
const SIZE: u64 = 5 * MIB + 3 * 512;

/// An image with ranges of random bytes, of one repeated byte and of written zeros, and with holes
/// between them.
fn source(scratch: &Scratch, random: &mut Rng) -> PathBuf {
    let image = scratch.image("source.raw", SIZE);
    let file = File::options().write(true).open(image.path()).expect("the image opens");
    for round in 0..30 {
        let start = random.u64(..SIZE);
        let most = [700, 30_000, 300_000][random.usize(..3)];
        let length = random.u64(1..=most).min(SIZE - start) as usize;
        let bytes = match round % 3 {
            0 => random_bytes(random, length),
            1 => vec![random.u8(..); length],
            _ => vec![0; length],
        };
        file.write_all_at(&bytes, start).expect("the image is written");
    }
    file.sync_all().expect("the image is flushed");
    image.path().to_owned()
}

fn expect_equal(one: &Path, other: &Path, what: &str) {
    for program in ["qemu-img", "blockhouse"] {
        let words = ["compare", str(one), str(other)];
        let mut command = match program {
            "qemu-img" => tool("qemu-img"),
            _ => Command::new(blockhouse()),
        };
        let outcome = run(command.args(words));
        assert!(outcome.status.success(), "{}", outcome.describe(what));
    }
}

/// The options that targets are made with.
const OPTIONS: [&str; 16] = [
    "cluster_size=512",
    "cluster_size=1k",
    "cluster_size=2k",
    "cluster_size=4k",
    "cluster_size=8k",
    "cluster_size=16k",
    "cluster_size=32k",
    "cluster_size=64k",
    "cluster_size=128k",
    "cluster_size=256k",
    "cluster_size=512k",
    "cluster_size=1M",
    "cluster_size=2M",
    "compat=0.10",
    "extended_l2=on,lazy_refcounts=on",
    "refcount_bits=1,cluster_size=4k",
];

fn there_and_back(compress: bool) {
    let scratch = Scratch::new();
    let mut random = seeded();
    let raw = source(&scratch, &mut random);
    let (ours, theirs) = (scratch.path("ours.qcow2"), scratch.path("theirs.qcow2"));
    let back = scratch.path("back.raw");
    for options in OPTIONS {
        let kind = if compress && options != "compat=0.10" && random.bool() {
            format!("{options},compression_type=zstd")
        } else {
            options.to_owned()
        };
        let how: &[&str] = if compress { &["-c"] } else { &[] };
        command(&[&["convert", "-o", &kind], how, &[str(&raw), str(&ours)]].concat()).success();
        qemu_img(&["check", str(&ours)]).success();
        command(&["check", str(&ours)]).success();
        expect_equal(&raw, &ours, &kind);
        let target = ["-O", "qcow2", "-o", &kind, str(&raw), str(&theirs)];
        qemu_img(&[&["convert"], how, &target].concat()).success();
        expect_equal(&ours, &theirs, &kind);
        command(&["convert", str(&theirs), str(&back)]).success();
        let (found, expected) = (std::fs::read(&back).unwrap(), std::fs::read(&raw).unwrap());
        assert!(found == expected, "{kind}: what comes back is something else");
        for image in [&ours, &theirs, &back] {
            std::fs::remove_file(image).expect("it is there");
        }
    }
}

#[test]
fn images_go_there_and_back() {
    require!(need::tools(&["qemu-img"]));
    there_and_back(false);
}

#[test]
fn compressed_images_go_there_and_back() {
    require!(need::tools(&["qemu-img"]));
    there_and_back(true);
}

#[test]
fn compressed_images_are_as_small_as_qemu_imgs() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let text: Vec<u8> = (0..8 * MIB).map(|i| (i / 7 % 251) as u8 ^ (i / 4096) as u8).collect();
    let raw = scratch.image_of("source.raw", &text);
    let (ours, theirs) = (scratch.path("ours.qcow2"), scratch.path("theirs.qcow2"));
    for kind in ["compression_type=zlib", "compression_type=zstd"] {
        command(&["convert", "-c", "-o", kind, raw.str(), str(&ours)]).success();
        qemu_img(&["convert", "-c", "-O", "qcow2", "-o", kind, raw.str(), str(&theirs)]).success();
        let [our_size, their_size] =
            [&ours, &theirs].map(|path| std::fs::metadata(path).expect("an image").len());
        assert!(our_size <= their_size + their_size / 5, "{kind}: {our_size}, {their_size}");
        let info = command(&["check", "--json", str(&ours)]).success().stdout;
        let info: Value = serde_json::from_str(&info).expect("JSON");
        assert_eq!(info["compressed-clusters"], 128, "{kind}");
        std::fs::remove_file(&ours).expect("it is there");
    }
}

#[test]
fn chains_become_one_image() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let raw = source(&scratch, &mut seeded());
    let (middle, top) = (scratch.path("middle.qcow2"), scratch.path("top.qcow2"));
    for (image, behind, size) in
        [(&middle, (str(&raw), "raw"), "7M"), (&top, (str(&middle), "qcow2"), "9M")]
    {
        let backing =
            ["create", "-q", "-f", "qcow2", "-b", behind.0, "-F", behind.1, str(image), size];
        qemu_img(&backing).success();
        let writes = ["-c", "write -P 3 1000k 100k", "-c", "write -z 2M 300k", str(image)];
        run(tool("qemu-io").args(["-f", "qcow2"]).args(writes)).success();
    }
    for (name, how) in [("flat.raw", &[][..]), ("flat.qcow2", &[]), ("packed.qcow2", &["-c"])] {
        let flat = scratch.path(name);
        command(&[&["convert"], how, &[str(&top), str(&flat)]].concat()).success();
        expect_equal(&top, &flat, name);
        let info = qemu_img(&["info", "--output=json", str(&flat)]).success().stdout;
        let info: Value = serde_json::from_str(&info).expect("JSON");
        assert_eq!(info["backing-filename"], Value::Null, "{name}");
    }
}

#[test]
fn zeros_take_no_space_and_a_huge_empty_disk_no_time() {
    let scratch = Scratch::new();
    // Written zeros, not holes.
    let zeros = scratch.image_of("zeros.raw", &vec![0; 8 << 20]);
    let huge = new_image(&scratch, "huge.qcow2", "64T");
    for (source, target) in [(zeros.path(), "zeros.qcow2"), (&*huge, "copy.qcow2")] {
        let target = scratch.path(target);
        command(&["convert", str(source), str(&target)]).success();
        let report = command(&["check", "--json", str(&target)]).success().stdout;
        let report: Value = serde_json::from_str(&report).expect("JSON");
        assert_eq!(report["allocated-clusters"], Value::Null, "{report}");
    }
    let raw = scratch.path("copy.raw");
    command(&["convert", zeros.str(), str(&raw)]).success();
    let blocks = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&raw).expect("a file"));
    assert_eq!(blocks, 0);
}

#[test]
fn compare_finds_the_first_difference_and_has_qemu_imgs_exit_codes() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let raw = source(&scratch, &mut seeded());
    let (same, longer) = (scratch.path("same.qcow2"), scratch.path("longer.raw"));
    command(&["convert", str(&raw), str(&same)]).success();
    let mut bytes = std::fs::read(&raw).expect("the source");
    bytes.resize(6 << 20, 0);
    std::fs::write(&longer, &bytes).expect("a longer image");
    let status = |words: &[&str]| {
        let (ours, theirs) = (command(words), qemu_img(words));
        let code = ours.status.code();
        assert_eq!(code, theirs.status.code(), "{}", ours.describe("the codes must be the same"));
        (code, ours)
    };
    assert_eq!(status(&["compare", str(&raw), str(&same)]).0, Some(0));
    assert_eq!(status(&["compare", str(&longer), str(&same)]).0, Some(0));
    assert_eq!(status(&["compare", "-s", str(&longer), str(&raw)]).0, Some(1));
    let middle = 3 * MIB as usize + 77;
    for at in [middle, bytes.len() - 1] {
        let mut changed = bytes.clone();
        changed[at] ^= 0x5a;
        std::fs::write(&longer, &changed).expect("a changed image");
        for images in [[str(&longer), str(&same)], [str(&same), str(&longer)]] {
            let (code, outcome) = status(&[&["compare"], &images[..]].concat());
            assert_eq!(code, Some(1));
            assert!(
                outcome.stdout.contains(&format!("mismatch at offset {at}!")),
                "{}",
                outcome.stdout
            );
            let json = command(&[&["compare", "--json"], &images[..]].concat()).stdout;
            let json: Value = serde_json::from_str(&json).expect("JSON");
            assert_eq!((&json["same"], &json["offset"]), (&false.into(), &at.into()), "{json}");
        }
    }
    assert_eq!(status(&["compare", str(&raw), "missing.raw"]).0, Some(2));
    let outcome = command(&["compare", str(&raw)]);
    assert_eq!(outcome.status.code(), Some(2), "{}", outcome.describe("wrong usage"));
    let wrong = scratch.path("wrong.img");
    std::fs::copy(&same, &wrong).expect("a copy");
    command(&["compare", str(&wrong), str(&raw)]).failure("say --format qcow2");
    command(&["compare", str(&raw), str(&wrong)]).failure("say --other-format qcow2");
}

#[test]
fn compare_tells_what_cannot_be_read() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    let raw = scratch.image_of("source.raw", &[7; 1 << 20]);
    command(&["convert", "-c", raw.str(), str(&image)]).success();
    let map = command(&["check", "--json", str(&image)]).success().stdout;
    let map: Value = serde_json::from_str(&map).expect("JSON");
    // The compressed data lies in the last clusters of the file.
    let end = map["image-end-offset"].as_u64().expect("an offset");
    let file = File::options().write(true).open(&image).expect("the image opens");
    file.write_all_at(&[0xff; 4096], end - (64 << 10)).expect("the damage is done");
    let outcome = command(&["compare", str(&image), raw.str()]);
    assert_eq!(outcome.status.code(), Some(4), "{}", outcome.describe("data that is damaged"));
    assert!(outcome.stderr.contains("decompress") && outcome.stderr.contains("offset"));
}

#[test]
fn what_exists_is_left_alone_and_replaced_only_when_all_is_well() {
    let scratch = Scratch::new();
    let raw = source(&scratch, &mut seeded());
    let target = scratch.image_of("target.img", &[0x70; 777]);
    let convert = ["convert", "--format", "raw", str(&raw), target.str()];
    command(&convert).failure("--force");
    assert_eq!(target.content(), [0x70; 777]);
    // The source cannot be opened, and the target exists already.
    let missing = ["convert", "--force", "--format", "raw", "missing.raw", target.str()];
    command(&missing).failure("missing.raw");
    assert_eq!(target.content(), [0x70; 777]);
    std::fs::set_permissions(target.path(), Permissions::from_mode(0o640)).expect("it is ours");
    command(&[&convert[..], &["--force"]].concat()).success();
    let mode = std::fs::metadata(target.path()).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o640, "what is replaced keeps its mode: {mode:o}");
    assert!(target.content() == std::fs::read(&raw).expect("the source"));
    let onto_itself = ["convert", "--force", "--format", "raw", str(&raw), str(&raw)];
    let outcome = command(&onto_itself);
    assert_eq!(outcome.status.code(), Some(1), "{}", outcome.describe("it is in use"));
    assert!(!scratch.path("target.img.part").exists());
}

#[test]
fn bad_requests_are_refused_in_one_line_and_leave_nothing() {
    let scratch = Scratch::new();
    let raw = source(&scratch, &mut seeded());
    let target = scratch.path("target.img");
    let looks = scratch.image_of("looks.raw", b"QFI\xfb and more, as many bytes as a sector has");
    let to_raw = ["convert", "--format", "raw"];
    let (raw, target_name) = (str(&raw), str(&target));
    for (words, code, said) in [
        (&[&to_raw[..], &["-c", raw, target_name]].concat()[..], 2, "compressed"),
        (&[&to_raw[..], &["-o", "compat=1.1", raw, target_name]].concat(), 2, "-o"),
        (&["convert", "-O", "parallels", raw, target_name], 2, "parallels"),
        (
            &["convert", "-O", "qcow2", "-o", "backing_file=a,backing_fmt=raw", raw, target_name],
            1,
            "cannot open its backing file",
        ),
        (
            &[&to_raw[..], &["--resume", raw, target_name]].concat(),
            1,
            "target.img.part: there is no copy to resume",
        ),
        (&[&to_raw[..], &[looks.str(), target_name]].concat(), 1, "--source-format"),
        (&[&to_raw[..], &["-f", "qcow2", raw, target_name]].concat(), 1, "qcow2"),
        (&[&to_raw[..], &[raw, "/missing/target.img"]].concat(), 1, "/missing/target.img"),
    ] {
        let outcome = command(words);
        assert_eq!(outcome.status.code(), Some(code), "{}", outcome.describe(said));
        assert!(outcome.stderr.contains(said), "{}", outcome.describe(said));
        if code == 1 {
            assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.describe("one line"));
        }
        assert!(!target.exists() && !scratch.path("target.img.part").exists(), "{words:?}");
    }
}

#[test]
fn a_full_disk_is_told_and_the_copy_is_gone_on_with_when_there_is_room() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::in_memory();
    let mut random = seeded();
    let raw = scratch.image_of("source.raw", &random_bytes(&mut random, 12 << 20));
    let folder = scratch.path("small");
    std::fs::create_dir(&folder).expect("a folder");
    let wrapper = require!(need::private_tmpfs(&folder, 6 * MIB));
    // One script does everything, because the file system is removed with the command.
    let script = r#"
        "$1" convert "$2" "$3" 2> error; code=$?
        test $code = 1 || { echo "exit status $code"; exit 90; }
        test ! -e "$3" && test -e "$3.part" || { ls -l; exit 91; }
        "$1" convert "$2" "$3" 2> again && exit 92
        mount -o remount,size=40M "$4" || exit 93
        "$1" convert --resume "$2" "$3" || exit 94
        test ! -e "$3.part" || exit 95
        qemu-img compare "$2" "$3" || exit 96
        cat error again
    "#;
    for name in ["target.raw", "target.qcow2"] {
        let target = folder.join(name);
        let words = [str(blockhouse()), raw.str(), str(&target), str(&folder)];
        let mut command = Command::new(&wrapper[0]);
        command.args(&wrapper[1..]).args(["sh", "-c", script, "sh"]).args(words);
        let outcome = run(command.current_dir(scratch.path("."))).success();
        let lines: Vec<&str> = outcome.stdout.lines().collect();
        for (line, said) in [(1, "No space left"), (1, "--resume"), (1, ".part"), (2, "--resume")] {
            assert!(lines[line].contains(said), "{}", outcome.describe(said));
        }
        assert_eq!(lines.len(), 3, "{}", outcome.describe("a line for each failure"));
    }
}

#[test]
fn a_copy_that_was_killed_is_gone_on_with() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let mut random = seeded();
    let raw = scratch.image_of("source.raw", &random_bytes(&mut random, 64 << 20));
    let target = scratch.path("target.qcow2");
    let part = scratch.path("target.qcow2.part");
    let words = ["convert", "-c", raw.str(), str(&target)];
    let mut child = Command::new(blockhouse()).args(words).spawn().expect("it starts");
    let has_begun = || std::fs::metadata(&part).is_ok_and(|found| found.len() > 4 << 20);
    let until = std::time::Duration::from_secs(30);
    assert!(blockhouse_tests::eventually(until, has_begun), "nothing is copied");
    child.kill().expect("it can be killed");
    let status = child.wait().expect("it ends");
    if status.success() {
        need::skip("the copy was complete before it could be killed");
        return;
    }
    assert!(!target.exists());
    command(&["convert", "--resume", "-c", raw.str(), str(&target)]).success();
    expect_equal(raw.path(), &target, "gone on with");
    // The check may find leaks, and nothing else.
    assert!([0, 3].contains(&command(&["check", str(&target)]).status.code().expect("a code")));
}

#[test]
fn what_is_no_part_of_this_copy_is_not_gone_on_with() {
    let scratch = Scratch::new();
    let raw = source(&scratch, &mut seeded());
    let target = scratch.path("target.qcow2");
    let part = scratch.path("target.qcow2.part");
    let resume = ["convert", "--resume", str(&raw), str(&target)];
    command(&["create", "-f", "qcow2", str(&part), "8M"]).success();
    command(&resume).failure("is no part of this copy");
    std::fs::write(&part, "something else").expect("a file");
    command(&resume).failure("remove it");
    assert_eq!(std::fs::read(&part).expect("it is there"), b"something else");
    assert!(!target.exists());
}

#[test]
fn a_block_device_is_overwritten_only_when_told_to() {
    let scratch = Scratch::new();
    let raw = source(&scratch, &mut seeded());
    let behind = scratch.image_of("device.img", &vec![0xee; 6 << 20]);
    let device = require!(LoopDevice::over(&behind, &[]));
    let name = str(device.path());
    let convert = ["convert", "--format", "raw", str(&raw), name];
    command(&convert).failure("--force");
    let image = ["convert", "--format", "qcow2", str(&raw), name];
    command(&image).failure("--force");
    assert!(behind.content().iter().all(|&byte| byte == 0xee), "it was touched");
    command(&[&convert[..], &["--force"]].concat()).success();
    let mut expected = std::fs::read(&raw).expect("the source");
    expected.resize(6 << 20, 0xee);
    assert!(behind.content() == expected, "the device is something else");
    let large = scratch.image("large.raw", 7 << 20);
    let too_large = ["convert", "--force", "--format", "raw", large.str(), name];
    command(&too_large).failure("use a larger device");
    command(&[&image[..], &["--force"]].concat()).success();
    let back = scratch.path("back.raw");
    command(&["convert", "--source-format", "qcow2", name, str(&back)]).success();
    assert!(
        std::fs::read(&back).expect("the copy") == std::fs::read(&raw).expect("the source"),
        "the image on the device has another disk"
    );
}

#[test]
fn a_snapshot_is_copied_as_qemu_img_copies_it() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let base = "backing_file=base.raw,backing_fmt=raw";
    for options in ["cluster_size=512", "compat=0.10", "extended_l2=on", base] {
        let scratch = Scratch::new();
        let image = scratch.path("disk.qcow2");
        scratch.image_of("base.raw", &vec![9; 2 << 20]);
        qemu_img(&["create", "-f", "qcow2", "-o", options, str(&image), "4M"]).success();
        qemu_io("qcow2", &image, &["write -P 1 100k 1M", "write -P 2 3M 1000k"]);
        command(&["snapshot", "create", str(&image), "early"]).success();
        qemu_io("qcow2", &image, &["write -P 3 0 3M"]);
        if options != "compat=0.10" {
            // Changes the size of the disk after the snapshot.
            qemu_img(&["resize", "-f", "qcow2", str(&image), "6M"]).success();
            qemu_io("qcow2", &image, &["write -P 4 4M 2M"]);
        }
        qemu_img(&["snapshot", "-c", "late", str(&image)]).success();
        qemu_io("qcow2", &image, &["write -P 5 1M 100k"]);
        // By name and by id.
        for (name, of_qemu) in [("early", "early"), ("late", "late"), ("2", "late")] {
            let what = format!("{options}: {name}");
            let [theirs, raw, packed] =
                ["theirs.raw", "ours.raw", "packed.qcow2"].map(|name| scratch.path(name));
            let words = ["convert", "-f", "qcow2", "-O", "raw", "-l", of_qemu];
            qemu_img(&[&words[..], &[str(&image), str(&theirs)]].concat()).success();
            command(&["convert", "--snapshot", name, str(&image), str(&raw)]).success();
            command(&["convert", "-c", "-l", name, str(&image), str(&packed)]).success();
            let [found, expected] =
                [&raw, &theirs].map(|path| std::fs::read(path).expect("a copy"));
            let size = if name == "early" || options == "compat=0.10" { 4 << 20 } else { 6 << 20 };
            assert_eq!(found.len(), size, "{what}");
            assert!(found == expected[..size], "{what}");
            // QEMU's copy of a snapshot has the current size of the disk.
            assert!(expected[size..].iter().all(|&byte| byte == 0), "{what}");
            expect_equal(&theirs, &packed, &what);
            qemu_img(&["check", str(&packed)]).success();
            for copy in [theirs, raw, packed] {
                std::fs::remove_file(copy).expect("it is there");
            }
        }
        qemu_img(&["check", str(&image)]).success();
    }
}

#[test]
fn a_snapshot_that_is_not_there_is_no_reason_for_a_copy() {
    let scratch = Scratch::new();
    let (image, copy) = (scratch.path("disk.qcow2"), scratch.path("copy.raw"));
    command(&["create", str(&image), "1M"]).success();
    let raw = scratch.image("disk.raw", MIB);
    for (source, why) in [(str(&image), "no snapshot 'none'"), (raw.str(), "raw image")] {
        let outcome = command(&["convert", "-l", "none", source, str(&copy)]).failure(why);
        assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.describe("one line"));
        assert!(!copy.exists() && !scratch.path("copy.raw.part").exists());
    }
}

/// QEMU copies zeros for all that a lost server had.
#[test]
fn a_bad_sector_becomes_zeros_and_a_lost_server_is_an_error() {
    require!(need::tools(&["nbdkit"]));
    let scratch = Scratch::new();
    let copy = scratch.path("copy.raw");
    let serve = |pread: &str| {
        let mut nbdkit = tool("nbdkit");
        nbdkit.args(["-U", "-", "eval", "get_size=echo 4194304", &format!("pread={pread}")]);
        let convert = format!("{} convert --salvage \"$uri\" {}", str(blockhouse()), str(&copy));
        run(nbdkit.arg("--run").arg(convert))
    };
    let data = "head -c $3 /dev/zero | tr '\\0' x";
    let bad = format!("[ $4 -lt 1048576 ] && [ $(($4 + $3)) -gt 1044480 ] && exit 1; {data}");
    serve(&bad).success();
    let found = std::fs::read(&copy).expect("a copy");
    assert!(found[..1_044_480].iter().all(|&byte| byte == b'x'));
    assert!(found[1_044_480..1_048_576].iter().all(|&byte| byte == 0));
    assert!(found[1_048_576..].iter().all(|&byte| byte == b'x'));
    std::fs::remove_file(&copy).expect("it is there");
    let outcome = serve(&format!("[ $4 -ge 2097152 ] && kill -9 $PPID; {data}"));
    let is_told = outcome.stderr.contains("the connection has failed");
    assert!(is_told && !copy.exists(), "{}", outcome.describe("a lost server"));
}
