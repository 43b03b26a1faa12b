//! Every option of a qcow2 image, in both directions: images that QEMU's tools made and wrote to
//! are served, and `qemu-io` writes to them through NBD; images that `blockhouse create` made and a
//! server wrote to are written to by `qemu-io` directly. After each step `qemu-img check` finds
//! neither errors nor leaks, and the disk equals a flat model.

use std::path::{Path, PathBuf};
use std::process::Command;

use blockhouse_tests::{
    Cache, Engine, Scratch, Serve, blockhouse, need, random_bytes, require, run, seeded, tool,
};
use fastrand::Rng;
use lab_images::{Backing, LAYOUTS, Layout};

/// Bytes of the disk, not a multiple of the larger cluster sizes.
const SIZE: u64 = (3 << 20) + 512 * 7;
/// Bytes of the backing file, which is shorter than the disk.
const BACKING_SIZE: u64 = 2 << 20;
const REQUESTS: usize = 40;

/// The maker of the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Maker {
    Qemu,
    Blockhouse,
}

fn qemu_img(words: &[&str]) {
    run(tool("qemu-img").args(words)).success();
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a plain name")
}

/// An image, and the expected content of its disk.
struct Case<'a> {
    scratch: &'a Scratch,
    name: String,
    image: PathBuf,
    model: Vec<u8>,
}

impl<'a> Case<'a> {
    /// Makes the image and its backing files.
    fn new(scratch: &'a Scratch, maker: Maker, layout: &Layout, random: &mut Rng) -> Self {
        let image = scratch.path("disk.qcow2");
        let mut model = vec![0; SIZE as usize];
        let (raw, middle) = (scratch.path("raw.img"), scratch.path("middle.qcow2"));
        // An absolute path, because QEMU resolves others relative to its working folder.
        let folder = image.parent().expect("a folder");
        let options = layout.options.replace("PATH", text(folder));
        let mut all = options.clone();
        if layout.backing != Backing::Nothing {
            let content = random_bytes(random, BACKING_SIZE as usize);
            std::fs::write(&raw, &content).expect("a raw image");
            model[..content.len()].copy_from_slice(&content);
            all += ",backing_file=raw.img,backing_fmt=raw";
        }
        let mut case = Self { scratch, name: format!("{options} by {maker:?}"), image, model };
        if layout.backing == Backing::Chain {
            let over_raw = "cluster_size=4K,backing_file=raw.img,backing_fmt=raw";
            let size = SIZE.to_string();
            qemu_img(&["create", "-q", "-f", "qcow2", "-o", over_raw, text(&middle), &size]);
            let commands = case.commands(random, 4);
            qemu_io(&[], text(&middle), "qcow2", &commands);
            all = format!("{options},backing_file=middle.qcow2,backing_fmt=qcow2");
        }
        let mut create = match maker {
            Maker::Qemu => tool("qemu-img"),
            Maker::Blockhouse => Command::new(blockhouse()),
        };
        create.args(["create", "-f", "qcow2", "-o", &all]).arg(&case.image);
        run(create.arg(SIZE.to_string())).success();
        case
    }

    /// Random writes, zero writes and discards for `qemu-io`, which are also applied to the model.
    fn commands(&mut self, random: &mut Rng, count: usize) -> Vec<String> {
        (0..count)
            .map(|_| {
                let start = random.u64(..SIZE / 512) * 512;
                let most = [4096, 70_000, 400_000][random.usize(..3)];
                let length = (random.u64(..most / 512) + 1) * 512;
                let end = SIZE.min(start + length);
                let part = &mut self.model[start as usize..end as usize];
                let place = format!("{start} {}", end - start);
                match random.u8(..8) {
                    0 => {
                        part.fill(0);
                        format!("write -z {place}")
                    }
                    1 => {
                        part.fill(0);
                        format!("write -z -u {place}")
                    }
                    2 => "flush".into(),
                    number => {
                        let byte = random.u8(1..);
                        part.fill(byte);
                        let fua = if number == 3 { "-f " } else { "" };
                        format!("write {fua}-P {byte} {place}")
                    }
                }
            })
            .collect()
    }

    /// Writes compressed clusters with QEMU to a part of the disk.
    fn pack(&mut self, random: &mut Rng) {
        let info = run(tool("qemu-img").args(["info", "--output=json"]).arg(&self.image)).success();
        let info: serde_json::Value = serde_json::from_str(&info.stdout).expect("JSON");
        let cluster = info["cluster-size"].as_u64().expect("a number");
        // QEMU writes no compressed data to an allocated cluster.
        let mut clusters: Vec<u64> = (0..SIZE.div_ceil(cluster)).collect();
        random.shuffle(&mut clusters);
        let commands: Vec<_> = clusters
            .iter()
            .take(6)
            .map(|number| {
                let start = number * cluster;
                let byte = random.u8(1..);
                let end = SIZE.min(start + cluster);
                self.model[start as usize..end as usize].fill(byte);
                format!("write -c -P {byte} {start} {}", end - start)
            })
            .collect();
        qemu_io(&[], text(&self.image), "qcow2", &commands);
    }

    fn write_directly(&mut self, random: &mut Rng) {
        let commands = self.commands(random, REQUESTS);
        qemu_io(&["-d", "unmap"], text(&self.image), "qcow2", &commands);
    }

    fn write_through_server(&mut self, random: &mut Rng) {
        let engine = Engine::ALL[random.usize(..3)];
        let serve = Serve::new(self.scratch, &self.image).engine(engine).cache(Cache::Writeback);
        let server = serve.option("--format", "qcow2").start();
        let commands = self.commands(random, REQUESTS);
        qemu_io(&["-d", "unmap"], server.uri(), "raw", &commands);
        self.compare(server.uri(), "raw");
        server.stop();
    }

    /// Checks that the image has no errors and its disk equals the model.
    fn verify(&self) {
        qemu_img(&["check", "-q", "-f", "qcow2", text(&self.image)]);
        self.compare(text(&self.image), "qcow2");
    }

    fn compare(&self, disk: &str, format: &str) {
        let flat = self.scratch.path("flat");
        std::fs::write(&flat, &self.model).expect("a file for the model");
        let mut compare = tool("qemu-img");
        compare.args(["compare", "-f", format, "-F", "raw", disk, text(&flat)]);
        let outcome = run(&mut compare);
        assert!(outcome.status.success(), "{}: {}", self.name, outcome.describe("must be equal"));
    }
}

fn qemu_io(options: &[&str], image: &str, format: &str, commands: &[String]) {
    let mut qemu_io = tool("qemu-io");
    qemu_io.args(options).args(["-f", format]);
    for command in commands {
        qemu_io.args(["-c", command]);
    }
    let outcome = run(qemu_io.arg(image)).success();
    let failed = outcome.stdout.lines().find(|line| line.contains("failed"));
    assert_eq!(failed, None, "{}", outcome.stderr);
}

/// Tests a quarter of the matrix, with images of one maker, so that several tests run in parallel.
fn go_through(maker: Maker, quarter: usize) {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let mut random = seeded();
    for layout in LAYOUTS.iter().skip(quarter).step_by(4) {
        eprintln!("{layout:?}, by {maker:?}");
        // tmpfs has no unwritten extents.
        let is_reserved = layout.option("preallocation") == Some("falloc");
        let scratch = if is_reserved { Scratch::new() } else { Scratch::in_memory() };
        let mut case = Case::new(&scratch, maker, layout, &mut random);
        case.verify();
        if layout.compressed {
            case.pack(&mut random);
        }
        if maker == Maker::Qemu {
            case.write_directly(&mut random);
        }
        case.write_through_server(&mut random);
        case.verify();
        case.write_directly(&mut random);
        case.verify();
    }
}

macro_rules! quarters {
    ($($test:ident: $maker:expr, $quarter:expr;)*) => { $(
        #[test]
        fn $test() {
            go_through($maker, $quarter);
        }
    )* };
}

quarters! {
    qemus_images_first_quarter: Maker::Qemu, 0;
    qemus_images_second_quarter: Maker::Qemu, 1;
    qemus_images_third_quarter: Maker::Qemu, 2;
    qemus_images_last_quarter: Maker::Qemu, 3;
    our_images_first_quarter: Maker::Blockhouse, 0;
    our_images_second_quarter: Maker::Blockhouse, 1;
    our_images_third_quarter: Maker::Blockhouse, 2;
    our_images_last_quarter: Maker::Blockhouse, 3;
}
