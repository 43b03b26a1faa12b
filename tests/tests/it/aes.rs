//! qcow2 images with QEMU's AES encryption from before LUKS: Blockhouse reads and writes those of
//! qemu-img, and QEMU reads ours.

use std::path::Path;

use blockhouse_tests::image_tool::{command, json, qemu_img, str};
use blockhouse_tests::{
    Image, Scratch, Serve, blockhouse, need, random_bytes, require, run, seeded, tool,
};

const SIZE: usize = 4 << 20;

/// A key file and a disk.
struct Fixture {
    scratch: Scratch,
    key: String,
    disk: Image,
}

impl Fixture {
    /// Makes a key file. QEMU pads or cuts a key that does not have 16 bytes.
    fn with_key(key: &str) -> Self {
        let (scratch, mut random) = (Scratch::new(), seeded());
        let path = scratch.path("key");
        std::fs::write(&path, key).expect("a key");
        let disk = scratch.image_of("disk.raw", &random_bytes(&mut random, SIZE));
        let key = str(&path).to_owned();
        Self { scratch, key, disk }
    }

    fn object(&self) -> String {
        format!("secret,id=key,file={}", self.key)
    }

    #[track_caller]
    fn assert_qemu_reads(&self, image: &Path) {
        let node = format!("driver=qcow2,encrypt.key-secret=key,file.filename={}", str(image));
        let raw = format!("driver=raw,file.filename={}", self.disk.str());
        qemu_img(&["compare", "--object", &self.object(), "--image-opts", &node, &raw]).success();
        command(&["check", str(image)]).success();
    }

    /// Makes the same changes to the raw disk and to a served image.
    fn change(&self, image: &Path, steps: &[&str]) {
        let with_steps = |target: &str| {
            let mut qemu_io = tool("qemu-io");
            qemu_io.args(["-f", "raw"]).args(steps.iter().flat_map(|step| ["-c", step]));
            run(qemu_io.arg(target)).success();
        };
        let serve = Serve::new(&self.scratch, image).option("--key-file", Path::new(&self.key));
        let server = serve.start();
        with_steps(server.uri());
        server.stop();
        with_steps(self.disk.str());
    }
}

#[test]
fn images_of_qemu_convert_equal_and_are_written() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let options = ["", ",compat=0.10", ",cluster_size=4K", ",extended_l2=on,cluster_size=128k"];
    for (index, options) in options.into_iter().enumerate() {
        let fixture = Fixture::with_key(["short", "longer than 16 bytes"][index % 2]);
        let image = fixture.scratch.path("a.qcow2");
        let options = format!("encrypt.format=aes,encrypt.key-secret=key{options}");
        let object = fixture.object();
        let words = ["convert", "-f", "raw", "-O", "qcow2", "--object", &object, "-o", &options];
        qemu_img(&[&words[..], &[fixture.disk.str(), str(&image)]].concat()).success();
        command(&["compare", "--key-file", &fixture.key, str(&image), fixture.disk.str()])
            .success();
        let steps = ["write -P 1 513 3000", "write -z 300k 200k", "write -f -P 4 2M 70k", "flush"];
        fixture.change(&image, &steps);
        fixture.assert_qemu_reads(&image);
    }
}

#[test]
fn images_of_ours_open_in_qemu_with_their_overlays_and_snapshots() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let fixture = Fixture::with_key("word");
    let (base, top) = (fixture.scratch.path("base.qcow2"), fixture.scratch.path("top.qcow2"));
    let encrypted = ["-f", "qcow2", "-o", "encrypt.format=aes", "--key-file", &fixture.key];
    let convert = ["convert", "-f", "raw", "-O", "qcow2"];
    let words = [&convert[..], &encrypted[2..], &[fixture.disk.str(), str(&base)]].concat();
    command(&words).success();
    fixture.assert_qemu_reads(&base);
    let create = ["create", "-b", "base.qcow2", "-F", "qcow2"];
    command(&[&create[..], &encrypted, &[str(&top), "4M"]].concat()).success();
    fixture.change(&top, &["write -P 1 513 3000", "write -z 1000k 5k", "write -P 3 1001k 700"]);
    let before = fixture.scratch.image_of("before.raw", &fixture.disk.content());
    command(&["snapshot", "create", str(&top), "one"]).success();
    fixture.change(&top, &["write -P 9 600 64k"]);
    let one = fixture.scratch.path("one.raw");
    let words = ["convert", "--key-file", &fixture.key, "--snapshot", "one", str(&top)];
    command(&[&words[..], &[str(&one)]].concat()).success();
    assert!(std::fs::read(&one).expect("it was made") == before.content(), "another disk");
    command(&["commit", "--key-file", &fixture.key, str(&top)]).success();
    fixture.assert_qemu_reads(&base);
}

#[test]
fn the_state_of_a_machine_is_loaded_as_it_was_saved() {
    let fixture = Fixture::with_key("word");
    let image = fixture.scratch.path("a.qcow2");
    let options = ["-o", "encrypt.format=aes", "--key-file", &fixture.key];
    command(&[&["create"], &options[..], &[str(&image), "4M"]].concat()).success();
    let loaded = fixture.scratch.path("loaded");
    let shell = |script: &str| {
        let mut shell = tool("sh");
        shell.args(["-c", script, str(blockhouse()), &fixture.key, str(&image)]);
        run(shell.args([fixture.disk.str(), str(&loaded)])).success();
    };
    shell("\"$0\" vmstate save --key-file \"$1\" \"$2\" one < \"$3\"");
    shell("\"$0\" vmstate load --key-file \"$1\" \"$2\" one > \"$4\"");
    assert!(std::fs::read(&loaded).expect("it was made") == fixture.disk.content());
    let bytes = std::fs::read(&image).expect("it is there");
    let first = &fixture.disk.content()[..512];
    assert!(!bytes.windows(512).step_by(512).any(|sector| sector == first), "in the clear");
}

#[test]
fn what_the_image_cannot_tell_is_refused() {
    let fixture = Fixture::with_key("word");
    let image = fixture.scratch.path("a.qcow2");
    let encrypted = ["-o", "encryption=on", "--key-file", &fixture.key];
    command(&[&["create"], &encrypted[..2], &[str(&image), "1M"]].concat()).failure("needs a key");
    assert!(!image.exists());
    let both = "encryption=on,encrypt.format=luks";
    command(&["create", "-o", both, str(&image), "1M"]).failure("mutually exclusive");
    command(&[&["create"], &encrypted[..], &[str(&image), "1M"]].concat()).success();
    let info = json(&command(&["info", "--json", str(&image)]).success());
    assert_eq!(info["format-specific"]["data"]["encrypt"]["format"], "aes");
    let out = fixture.scratch.path("out.raw");
    command(&["convert", str(&image), str(&out)]).failure("no key was named");
    let keys = ["--key-file", &fixture.key, "--passphrase-file", &fixture.key];
    let words = [&["convert"], &keys[..], &[str(&image), str(&out)]].concat();
    command(&words).failure("which of several keys");
}
