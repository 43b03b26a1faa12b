//! One disk under several names: a file, its loop devices, a partition of one, a mount.

use std::fs::hard_link;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use blockhouse_tests::{
    LoopDevice, Outcome, Scratch, Serve, blockhouse, nbd_uri, need, random_bytes, require, run,
    seeded, tool,
};

const SIZE: u64 = 8 << 20;
const MIB: usize = 1 << 20;

fn convert(options: &[&str], source: &Path, target: &Path) -> Outcome {
    let mut convert = Command::new(blockhouse());
    convert.arg("convert").args(["-n", "-O", "raw"]).args(options);
    run(convert.arg(source).arg(target))
}

#[test]
fn a_target_that_is_its_own_source_by_another_name_is_refused() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let content = random_bytes(&mut seeded(), SIZE as usize);
    let image = scratch.image_of("disk.img", &content);
    let one = require!(LoopDevice::over(&image, &[]));
    let other = require!(LoopDevice::over(&image, &[]));
    let over = scratch.path("over.qcow2");
    let create = ["create", "-f", "qcow2", "-F", "raw", "-b", "disk.img"];
    run(tool("qemu-img").args(create).arg(&over)).success();
    // Also without locks.
    for options in [&["-f", "raw"][..], &["-f", "raw", "-U"]] {
        convert(options, image.path(), one.path()).failure("disk.img");
        convert(options, one.path(), image.path()).failure("disk.img");
        convert(options, one.path(), other.path()).failure(one.path().to_str().expect("a name"));
    }
    convert(&["-f", "qcow2", "-U"], &over, one.path()).failure("disk.img");
    convert(&["-f", "raw", "-U"], image.path(), image.path()).failure("disk.img");
    let mut dd = Command::new(blockhouse());
    dd.args(["dd", "--force", "-f", "raw", "-O", "raw", "bs=1M", "count=1"]);
    dd.arg(format!("if={}", image.str())).arg(format!("of={}", one.path().display()));
    run(&mut dd).failure("disk.img");
    run(&mut tool("sync")).success();
    assert!(image.content() == content, "the source was written to");
}

#[test]
fn parts_of_one_file_that_do_not_meet_are_two_disks() {
    let scratch = Scratch::new();
    let content = random_bytes(&mut seeded(), SIZE as usize);
    let image = scratch.image_of("disk.img", &content);
    let (half, offset) = ((SIZE / 2).to_string(), (SIZE / 2).to_string());
    let first = require!(LoopDevice::over(&image, &["--sizelimit", &half]));
    let second = require!(LoopDevice::over(&image, &["--offset", &offset]));
    convert(&["-f", "raw"], first.path(), second.path()).success();
    let whole = require!(LoopDevice::over(&image, &[]));
    convert(&["-f", "raw"], second.path(), whole.path()).failure("has bytes of");
    convert(&["-f", "raw"], second.path(), image.path()).failure("disk.img");
    run(&mut tool("sync")).success();
    let half = SIZE as usize / 2;
    assert!(image.content() == [&content[..half], &content[..half]].concat());
}

#[test]
fn a_disk_is_served_for_writing_by_one_of_its_names() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", SIZE);
    let one = require!(LoopDevice::over(&image, &[]));
    let other = require!(LoopDevice::over(&image, &[]));
    let names = [image.path(), one.path(), other.path()];
    for name in names {
        let server = Serve::new(&scratch, name).start();
        for second in names {
            let uri = nbd_uri("", scratch.socket("second"));
            let refused = Serve::bare(&scratch, second).export(&uri).refused();
            refused.failed(&[second.to_str().expect("a plain name")]);
        }
        server.stop();
    }
}

#[test]
fn a_mounted_device_and_the_file_behind_it_are_no_targets() {
    require!(need::tools(&["mkfs.ext4", "mount"]));
    let scratch = Scratch::new();
    let source = scratch.image("source.img", SIZE);
    let image = scratch.image("disk.img", 4 * SIZE);
    let device = require!(LoopDevice::over(&image, &[]));
    run(tool("mkfs.ext4").arg("-q").arg(device.path())).success();
    let at = scratch.path("mounted");
    std::fs::create_dir(&at).expect("a folder");
    if !run(tool("mount").arg(device.path()).arg(&at)).status.success() {
        return need::skip("cannot mount a file system");
    }
    let mounted = at.to_str().expect("a plain name");
    let refused = [device.path(), image.path()].map(|target| {
        let served = Serve::new(&scratch, target).refused();
        (convert(&["-f", "raw"], source.path(), target), served)
    });
    run(tool("umount").arg(&at)).success();
    for (converted, served) in refused {
        converted.failure(mounted);
        served.failed(&[mounted]);
    }
    run(tool("fsck.ext4").args(["-fn"]).arg(device.path())).success();
    // Once the device is free, it can be a target.
    convert(&["-f", "raw"], source.path(), device.path()).success();
}

/// Under the name qemu-img, which overwrites existing files.
#[test]
fn an_image_is_not_made_over_its_own_backing_file() {
    let scratch = Scratch::new();
    let folder = scratch.path("");
    let content = random_bytes(&mut seeded(), 1 << 20);
    let image = scratch.image_of("base.img", &content);
    let program = scratch.path("qemu-img");
    symlink(blockhouse(), &program).expect("a link");
    symlink(image.path(), scratch.path("link.img")).expect("a link");
    hard_link(image.path(), scratch.path("hard.img")).expect("a link");
    let make = |words: &[&str]| {
        run(Command::new(&program)
            .args(["create", "-q", "-f", "qcow2"])
            .args(words)
            .current_dir(&folder))
    };
    let base = image.str();
    make(&["-F", "raw", "-b", "base.img", "top.qcow2"]).success();
    let device = LoopDevice::over(&image, &[]);
    let device = device.as_ref().ok().and_then(|device| device.path().to_str());
    for target in ["./base.img", base, "link.img", "hard.img"].into_iter().chain(device) {
        let top = scratch.path("top.qcow2");
        for (format, backing) in [("raw", base), ("qcow2", top.to_str().expect("a name"))] {
            let refused = make(&["-F", format, "-b", backing, target]);
            assert!(!refused.status.success(), "{target} over {backing}");
            assert!(image.content() == content, "{target} over {backing}");
        }
    }
    // Another file is overwritten.
    make(&["-F", "raw", "-b", "base.img", "top.qcow2"]).success();
}

/// Runs a line of bash in the scratch folder; `$bh` is the binary, `$img` the binary as qemu-img.
fn shell(scratch: &Scratch, line: &str) -> Outcome {
    let img = scratch.path("qemu-img");
    if !img.exists() {
        symlink(blockhouse(), &img).expect("a link");
    }
    let mut shell = Command::new("sh");
    shell.args(["-c", line]).current_dir(scratch.path("."));
    run(shell.env("bh", blockhouse()).env("img", img))
}

#[test]
fn a_data_file_is_neither_the_source_nor_a_backing_file_nor_the_image() {
    let scratch = Scratch::new();
    let content = random_bytes(&mut seeded(), MIB);
    let image = scratch.image_of("a.raw", &content);
    std::fs::create_dir(scratch.path("d")).expect("a folder");
    for program in ["$bh", "$img"] {
        for (line, said) in [
            ("convert -O qcow2 -B a.raw -F raw -o data_file=a.raw a.raw o.qcow2", "has bytes of"),
            ("create -f qcow2 -F raw -b a.raw -o data_file=a.raw o.qcow2", "has bytes of"),
            ("create -f qcow2 -o data_file=o.qcow2 o.qcow2 1M", "its own data file"),
            ("create -f qcow2 -o data_file=../d/o.qcow2 d/o.qcow2 1M", "its own data file"),
        ] {
            shell(&scratch, &format!("{program} {line}")).failure(said);
            assert!(image.content() == content, "{program} {line}");
            shell(&scratch, "ls . d | grep qcow2; test $? = 1").success();
        }
    }
    let line = "$bh convert -O qcow2 -o data_file=a.raw - out.qcow2 < a.raw";
    shell(&scratch, line).failure("has bytes of");
    assert!(image.content() == content && !scratch.path("out.qcow2").exists());
}

#[test]
fn a_copy_removes_no_file_of_a_name_that_users_choose() {
    let scratch = Scratch::new();
    let source = scratch.image_of("a.raw", &random_bytes(&mut seeded(), MIB));
    for format in ["raw", "qcow2", "vmdk"] {
        let line = format!(
            "echo old > o && echo mine > o.part && $img convert -f raw -O {format} a.raw o && cat o.part"
        );
        assert_eq!(shell(&scratch, &line).success().stdout.trim(), "mine", "{format}");
        // A killed copy has left its file.
        let line =
            format!("echo left > .o.part && $img convert -f raw -O {format} a.raw o && ls -a");
        assert!(!shell(&scratch, &line).success().stdout.contains(".o.part"), "{format}");
        let line = format!("$bh compare -f raw -F {format} {} o", source.str());
        shell(&scratch, &line).success();
    }
}

#[test]
fn an_image_that_looks_like_another_format_gets_no_bitmaps_as_a_raw_disk() {
    let scratch = Scratch::new();
    shell(&scratch, "$bh create -f qcow2 a.qcow2 1M && mv a.qcow2 a.img").success();
    for line in
        ["bitmap add a.img b", "serve a.img --bitmaps a.bits --nbd 'nbd+unix:///?socket=s.sock'"]
    {
        shell(&scratch, &format!("$bh {line}")).failure("looks like qcow2");
    }
    shell(&scratch, "ls a.*bit*; test $? != 0 && $bh bitmap add -f raw a.img b").success();
}
