//! Disks through pipes, and disks of several sources: `convert -`, `convert A B C TARGET`.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use blockhouse_tests::image_tool::{command, json, qemu_img, str};
use blockhouse_tests::{
    Image, Outcome, Scratch, Serve, blockhouse, need, random_bytes, require, run, seeded,
    wait_for_exit,
};
use std::os::unix::process::ExitStatusExt;

/// Runs a shell line in the scratch folder, where `$blockhouse` is the binary.
fn shell(scratch: &Scratch, line: &str) -> Outcome {
    let mut shell = Command::new("sh");
    shell.args(["-c", line]).current_dir(scratch.path("")).env("blockhouse", blockhouse());
    run(&mut shell)
}

/// A disk with data at its start, in its middle and in its last sector, and zeros between.
fn sparse_disk(scratch: &Scratch, name: &str, length: usize) -> Image {
    let mut content = vec![0; length];
    let mut random = seeded();
    for (start, part) in [(0, 100_000), (length / 2 + 777, 300_000), (length - 100, 100)] {
        content[start..start + part].copy_from_slice(&random_bytes(&mut random, part));
    }
    scratch.image_of(name, &content)
}

fn virtual_size(image: &Path) -> u64 {
    let info = json(&command(&["info", "--json", str(image)]).success());
    info["virtual-size"].as_u64().expect("a size")
}

#[test]
fn what_comes_through_a_pipe_becomes_an_image() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    // The last piece is not a whole sector.
    let disk = sparse_disk(&scratch, "disk.img", (9 << 20) + 1001);
    let padded = disk.content().len().next_multiple_of(512);
    for (index, words) in [
        "-O qcow2",
        "-O raw",
        "-c -O qcow2",
        "-O qcow2 -o cluster_size=2M",
        "-c -O qcow2 -o cluster_size=2M,compression_type=zstd",
        "-O qcow2 -o cluster_size=512",
        "-t none -O qcow2",
    ]
    .into_iter()
    .enumerate()
    {
        let target = scratch.path(&format!("copy{index}"));
        // Through a pipe, and from a file whose length is known.
        for line in [
            format!("cat disk.img | $blockhouse convert {words} - copy{index}"),
            format!("$blockhouse convert --force {words} - copy{index} < disk.img"),
        ] {
            let outcome = shell(&scratch, &line).success();
            assert!(outcome.stderr.contains("filled up with zeros"), "{}", outcome.stderr);
            let format = if words.contains("raw") { "raw" } else { "qcow2" };
            let raw = scratch.path("flat");
            qemu_img(&["convert", "-f", format, "-O", "raw", str(&target), str(&raw)]).success();
            let flat = std::fs::read(&raw).expect("a file");
            assert_eq!(flat.len(), padded, "{line}");
            let content = disk.content();
            assert!(
                flat[..content.len()] == content && flat[content.len()..].iter().all(|b| *b == 0)
            );
            if format == "qcow2" {
                qemu_img(&["check", "-f", "qcow2", str(&target)]).success();
            }
        }
        let big_clusters = words.contains("2M");
        let info = json(&command(&["info", "--json", "-f", "raw", str(&target)]).success());
        let space = info["actual-size"].as_u64().expect("a size");
        assert!(big_clusters || space < 3 << 20, "zeros take no space: {words} {space}");
    }
}

#[test]
fn a_stream_may_be_longer_than_anybody_said() {
    let scratch = Scratch::new();
    // Longer than the first step in which a target grows.
    let line = "truncate -s 2500M long.img && $blockhouse convert long.img - | $blockhouse convert - long.qcow2";
    shell(&scratch, line).success();
    assert_eq!(virtual_size(&scratch.path("long.qcow2")), 2500 << 20);
    command(&["check", str(&scratch.path("long.qcow2"))]).success();
    // An existing target keeps its size.
    shell(&scratch, "truncate -s 1M short.img").success();
    let outcome = shell(&scratch, "head -c 2M /dev/zero | $blockhouse convert -n - short.img");
    outcome.failure("1048576 bytes, and more than that came");
    shell(&scratch, "printf x | $blockhouse convert -n - short.img").success();
    let content = std::fs::read(scratch.path("short.img")).expect("a file");
    assert_eq!((content.len(), content[0], content[1]), (1 << 20, b'x', 0));
}

#[test]
fn a_disk_goes_through_a_pipe_whole() {
    let scratch = Scratch::new();
    let disk = sparse_disk(&scratch, "disk.img", 5 << 20);
    let image = scratch.path("disk.qcow2");
    command(&["convert", disk.str(), str(&image)]).success();
    command(&["snapshot", "create", str(&image), "before"]).success();
    for line in [
        "$blockhouse convert disk.qcow2 - > out",
        "$blockhouse convert disk.qcow2 - | cat > out",
        "$blockhouse convert -p disk.qcow2 -O raw - 2> said > out && grep -q '100.00/100%' said",
        "$blockhouse convert -l before disk.qcow2 - > out",
        "$blockhouse convert disk.qcow2 - | $blockhouse convert -c - again.qcow2 && $blockhouse convert again.qcow2 - > out",
    ] {
        shell(&scratch, line).success();
        assert!(std::fs::read(scratch.path("out")).expect("a file") == disk.content(), "{line}");
    }
    shell(&scratch, "$blockhouse convert disk.img disk.qcow2 - > out").success();
    let twice = [disk.content(), disk.content()].concat();
    assert!(std::fs::read(scratch.path("out")).expect("a file") == twice);
    // When the reader ends, the command ends, like any command that writes to a pipe.
    let mut convert = Command::new(blockhouse());
    convert.args(["convert", str(&image), "-"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = convert.spawn().expect("it starts");
    drop(child.stdout.take());
    let status = wait_for_exit(&mut child, Duration::from_secs(60)).expect("it ends");
    assert_eq!(status.signal(), Some(13), "{status}");
    let said = std::io::read_to_string(child.stderr.take().expect("a pipe")).expect("text");
    assert_eq!(said, "");
    // A full device as the target is an error.
    let full = File::options().write(true).open("/dev/full").expect("it is there");
    let mut convert = Command::new(blockhouse());
    convert.args(["convert", str(&image), "-"]).stdout(full).stderr(Stdio::piped());
    let mut child = convert.spawn().expect("it starts");
    let status = wait_for_exit(&mut child, Duration::from_secs(60)).expect("it ends");
    assert_eq!(status.code(), Some(1), "{status}");
}

#[test]
fn what_a_pipe_cannot_have_is_told() {
    let scratch = Scratch::new();
    command(&["create", "-f", "qcow2", str(&scratch.path("disk.qcow2")), "1M"]).success();
    for (line, status, said) in [
        ("true | $blockhouse convert - new.qcow2", 1, "is empty"),
        ("cat disk.qcow2 | $blockhouse convert - new.qcow2", 1, "looks like qcow2"),
        ("cat disk.qcow2 | $blockhouse convert -f qcow2 - new.qcow2", 2, "into a file"),
        ("$blockhouse convert disk.qcow2 -O qcow2 - | cat > new; exit 2", 2, "needs a file"),
        ("echo x | $blockhouse convert - - > new; exit 2", 2, "one of the two"),
        ("echo x | $blockhouse convert --resume - new.qcow2", 2, "--resume"),
        ("echo x | $blockhouse convert -o preallocation=full - new.qcow2", 2, "preallocation"),
        ("echo x | $blockhouse convert -l snap - new.qcow2", 2, "snapshots"),
        ("echo x | $blockhouse convert disk.qcow2 - new.qcow2", 2, "only source"),
        ("$blockhouse dd if=disk.qcow2", 2, "blockhouse convert SOURCE -"),
        ("$blockhouse convert disk.qcow2", 2, "a source and a target"),
    ] {
        let outcome = shell(&scratch, line);
        assert_eq!(outcome.status.code(), Some(status), "{}", outcome.describe(line));
        assert!(outcome.stderr.contains(said), "{}", outcome.describe(said));
    }
    for left in ["new.qcow2", "new.qcow2.part"] {
        assert!(!scratch.path(left).exists(), "{left}");
    }
    // With `-f raw` the bytes of the image are copied.
    let line =
        "cat disk.qcow2 | $blockhouse convert -f raw - bytes.img && cmp disk.qcow2 bytes.img";
    shell(&scratch, line).success();
}

#[test]
fn a_served_disk_is_filled_and_read_through_pipes() {
    require!(need::tools(&["nbdcopy"]));
    let scratch = Scratch::new();
    let disk = sparse_disk(&scratch, "disk.img", 4 << 20);
    let image = scratch.path("served.qcow2");
    command(&["create", "-f", "qcow2", str(&image), "4M"]).success();
    let server = Serve::new(&scratch, &image).start();
    let uri = server.uri();
    shell(&scratch, &format!("cat disk.img | $blockhouse convert -n - '{uri}'")).success();
    shell(&scratch, &format!("nbdcopy '{uri}' - > theirs")).success();
    shell(&scratch, &format!("$blockhouse convert '{uri}' - > ours")).success();
    for name in ["theirs", "ours"] {
        assert!(std::fs::read(scratch.path(name)).expect("a file") == disk.content(), "{name}");
    }
    server.stop();
}

#[test]
fn several_sources_become_one_disk_as_qemu_img_makes_it() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let first = sparse_disk(&scratch, "first.img", (1 << 20) + 512);
    let second = sparse_disk(&scratch, "second.img", (3 << 20) + 4096);
    let third = scratch.path("third.qcow2");
    command(&["convert", second.str(), str(&third)]).success();
    let theirs = scratch.path("theirs.raw");
    let sources = [first.str(), second.str(), str(&third), first.str()];
    qemu_img(&[&["convert", "-O", "raw"][..], &sources, &[str(&theirs)]].concat()).success();
    for words in [
        &["-O", "raw"][..],
        &["-O", "qcow2"],
        &["-c", "-O", "qcow2"],
        &["-O", "qcow2", "-o", "cluster_size=2M"],
        &["-m", "4", "-W", "-O", "qcow2", "-o", "extended_l2=on"],
    ] {
        let ours = scratch.path("ours");
        let all = [&["convert", "--force"][..], &sources[..1], words, &sources[1..], &[str(&ours)]];
        command(&all.concat()).success();
        qemu_img(&["compare", "-F", "raw", str(&ours), str(&theirs)]).success();
        if words.contains(&"qcow2") {
            qemu_img(&["check", "-f", "qcow2", str(&ours)]).success();
        }
    }
    for (words, said) in [(&["-l", "snap"][..], "-l"), (&["-B", "first.img", "-F", "raw"], "-B")] {
        let ours = scratch.path("none.qcow2");
        let outcome = command(&[&["convert"], words, &sources, &[str(&ours)]].concat());
        assert_eq!(outcome.status.code(), Some(2), "{}", outcome.describe("wrong usage"));
        assert!(outcome.stderr.contains(said) && !ours.exists(), "{}", outcome.stderr);
    }
}

#[test]
fn a_rate_is_not_exceeded() {
    let scratch = Scratch::new();
    let disk = scratch.image_of("disk.img", &random_bytes(&mut seeded(), 3 << 20));
    let [copy, over, flat] = ["copy.qcow2", "over.qcow2", "flat.vmdk"].map(|n| scratch.path(n));
    // The limit determines the time also on a slow machine: after the first second's budget, 2 MiB
    // take at least this long.
    let limit = Duration::from_millis(500);
    for words in [
        &["convert", "-r", "1M", disk.str(), str(&copy)][..],
        &["convert", "-r", "1M", disk.str(), str(&scratch.path("copy.vdi"))],
        &["convert", "-r", "1M", "-o", "subformat=monolithicFlat", disk.str(), str(&flat)],
        &["convert", "-r", "1M", "-n", disk.str(), str(&over)],
        &["commit", "-r", "1M", str(&over)],
    ] {
        if words.contains(&"-n") {
            command(&["create", "-b", str(&copy), "-F", "qcow2", str(&over)]).success();
            // The new data differs from that of the backing file.
            std::fs::write(disk.path(), random_bytes(&mut seeded(), 3 << 20)).expect("written");
            let mut other = disk.content();
            other.reverse();
            std::fs::write(disk.path(), other).expect("written");
        }
        let start = std::time::Instant::now();
        command(words).success();
        assert!(start.elapsed() > limit, "{words:?} {:?}", start.elapsed());
    }
    // A limit of 0 means no limit.
    let target = scratch.path("unlimited.img");
    command(&["convert", "-r", "0", disk.str(), str(&target)]).success();
}
