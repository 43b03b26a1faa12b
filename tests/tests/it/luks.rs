//! LUKS containers of qemu-img and cryptsetup: Blockhouse converts and serves their content, and
//! these programs read what it writes. A container that cannot be opened gets one line, soon and
//! with little memory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock, Mutex, OnceLock};

use blockhouse_tests::image_tool::{command, json as printed, qemu_img, str};
use blockhouse_tests::{
    Image, Outcome, Scratch, Serve, need, random_bytes, require, run, seeded, tool,
};

pub(crate) const SIZE: usize = 4 << 20;
const KEY: &[u8] = b"not a line\nbut a key\n";
/// The content of the disk of all fixtures.
static DISK: LazyLock<Vec<u8>> = LazyLock::new(|| random_bytes(&mut seeded(), SIZE));
/// The containers that qemu-img has made of the disk, by their options: it measures the machine for
/// two seconds of processor time before it makes one.
static CONTAINERS: Mutex<BTreeMap<String, Arc<OnceLock<Vec<u8>>>>> = Mutex::new(BTreeMap::new());

/// Two key files and a disk.
pub(crate) struct Fixture {
    pub(crate) scratch: Scratch,
    pub(crate) key: PathBuf,
    pub(crate) disk: Image,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        let scratch = Scratch::new();
        let key = scratch.path("key");
        std::fs::write(&key, KEY).expect("a key");
        std::fs::write(scratch.path("other"), b"not the key").expect("another key");
        let disk = scratch.image_of("disk.raw", &DISK);
        Self { scratch, key, disk }
    }

    fn other_key(&self) -> PathBuf {
        self.scratch.path("other")
    }

    /// A container that qemu-img makes of the disk.
    pub(crate) fn of_qemu(&self, name: &str, options: &str) -> PathBuf {
        let image = self.scratch.path(name);
        let of_options =
            CONTAINERS.lock().expect("no panic").entry(options.to_owned()).or_default().clone();
        let container = of_options.get_or_init(|| {
            let (made, secret) = (self.scratch.path("made.luks"), secret(&self.key));
            let options = format!("key-secret=key,iter-time=10{options}");
            let words = ["convert", "-f", "raw", "-O", "luks", "--object", &secret, "-o", &options];
            make_by_qemu(&[&words[..], &[self.disk.str(), str(&made)]].concat());
            std::fs::read(made).expect("it was made")
        });
        std::fs::write(&image, container).expect("a copy");
        image
    }

    /// A container that cryptsetup makes of a copy of the disk, which it encrypts in place.
    fn of_cryptsetup(&self, name: &str, options: &[&str]) -> PathBuf {
        let image = self.scratch.path(name);
        std::fs::copy(self.disk.path(), &image).expect("a copy");
        // Space for twice the header, because cryptsetup moves the data.
        let file = std::fs::File::options().write(true).open(&image).expect("it is there");
        file.set_len(SIZE as u64 + (32 << 20)).expect("a longer file");
        let mut reencrypt = tool("cryptsetup");
        reencrypt.args(["reencrypt", "--encrypt", "--type", "luks2", "--batch-mode"]);
        reencrypt.args(["--reduce-device-size", "32M", "--disable-locks", "--key-file"]);
        run(reencrypt.arg(&self.key).args(options).arg(&image)).success();
        image
    }

    fn convert(&self, image: &Path, key: &Path) -> Outcome {
        let raw = self.scratch.path("out.raw");
        let _ = std::fs::remove_file(&raw);
        command(&["convert", "-f", "luks", "--key-file", str(key), str(image), str(&raw)])
    }

    /// Asserts that the disk in a container begins with the content of the disk.
    #[track_caller]
    fn assert_holds_disk(&self, image: &Path) {
        self.convert(image, &self.key).success();
        let out = std::fs::read(self.scratch.path("out.raw")).expect("it was made");
        assert!(out[..SIZE] == self.disk.content(), "{}: another disk", image.display());
    }
}

/// Makes an encrypted image with qemu-img. qemu-img measures how fast the machine derives keys,
/// which may fail on a busy machine: then it is run again.
#[track_caller]
fn make_by_qemu(words: &[&str]) {
    const TRIES: usize = 30;
    for _ in 1..TRIES {
        let outcome = qemu_img(words);
        if !outcome.stderr.contains("Unable to get accurate CPU usage") {
            outcome.success();
            return;
        }
    }
    qemu_img(words).success();
}

pub(crate) fn secret(key: &Path) -> String {
    format!("secret,id=key,file={}", key.display())
}

#[test]
fn containers_of_qemu_img_convert_equal() {
    require!(need::tools(&["qemu-img"]));
    let fixture = Fixture::new();
    for (index, options) in [
        "",
        ",cipher-alg=aes-128,hash-alg=sha1",
        ",cipher-alg=aes-192,hash-alg=sha512",
        ",cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=sha256",
        ",cipher-mode=cbc,ivgen-alg=plain,cipher-alg=aes-128",
        ",cipher-mode=cbc,ivgen-alg=plain64,cipher-alg=aes-256",
    ]
    .into_iter()
    .enumerate()
    {
        let image = fixture.of_qemu(&format!("{index}.luks"), options);
        fixture.assert_holds_disk(&image);
        let info = printed(&command(&["info", "--json", str(&image)]).success());
        let theirs = printed(&qemu_img(&["info", "--output=json", str(&image)]).success());
        for key in ["format", "virtual-size", "encrypted"] {
            assert_eq!(info[key], theirs[key], "{key} with {options}");
        }
        let (ours, theirs) =
            (&info["blockhouse"]["encryption"], &theirs["format-specific"]["data"]);
        assert_eq!(
            (&ours["uuid"], &ours["payload-offset"]),
            (&theirs["uuid"], &theirs["payload-offset"])
        );
    }
}

#[test]
fn ciphers_that_are_not_there_are_named() {
    require!(need::tools(&["qemu-img"]));
    let fixture = Fixture::new();
    let image = fixture.of_qemu("serpent.luks", ",cipher-alg=serpent-256");
    let outcome = fixture.convert(&image, &fixture.key).failure("serpent-xts-plain64");
    assert!(outcome.stderr.contains("cryptsetup may open it"), "{}", outcome.stderr);
}

#[test]
fn containers_of_cryptsetup_convert_equal() {
    require!(need::tools(&["cryptsetup"]));
    let fixture = Fixture::new();
    let argon2 = ["--pbkdf-memory", "32768", "--pbkdf-force-iterations", "4"];
    let pbkdf2 = ["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"];
    let essiv = ["--cipher", "aes-cbc-essiv:sha256", "--key-size", "256", "--hash", "sha512"];
    for (name, options) in [
        ("id.img", [&argon2[..], &["--pbkdf", "argon2id"]].concat()),
        ("i.img", [&argon2[..], &["--pbkdf", "argon2i", "--sector-size", "2048"]].concat()),
        ("large.img", [&pbkdf2[..], &["--sector-size", "4096"]].concat()),
        ("essiv.img", [&pbkdf2[..], &essiv[..], &["--sector-size", "4096"]].concat()),
    ] {
        fixture.assert_holds_disk(&fixture.of_cryptsetup(name, &options));
    }
}

#[test]
fn every_key_slot_opens_and_one_of_many_keys_is_enough() {
    require!(need::tools(&["cryptsetup", "qemu-img"]));
    let fixture = Fixture::new();
    let image = fixture.of_qemu("slots.luks", "");
    let mut add = tool("cryptsetup");
    add.args(["luksAddKey", "--batch-mode", "--disable-locks", "--pbkdf-force-iterations", "1000"]);
    run(add.arg("--key-file").arg(&fixture.key).arg(&image).arg(fixture.other_key())).success();
    let open = |keys: &[&str]| {
        command(
            &[&["compare", "-f", "luks", "-F", "raw"], keys, &[str(&image), fixture.disk.str()]]
                .concat(),
        )
    };
    let (key, other) = (str(&fixture.key).to_owned(), fixture.other_key());
    open(&["--key-file", &key]).success();
    // The line without its line feed is the same key.
    let line = fixture.scratch.path("line");
    std::fs::write(&line, b"not the key\nsecond line").expect("written");
    open(&["--passphrase-file", str(&line)]).success();
    open(&["--key-file", str(&line), "--key-file", str(&other)]).success();
    open(&["--key-file", str(&line)]).failure("none of its 2 key slots");
}

#[test]
fn what_is_written_through_a_server_is_what_qemu_reads() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let fixture = Fixture::new();
    let image = fixture.of_qemu("served.luks", "");
    let server = Serve::new(&fixture.scratch, &image).option("--key-file", &fixture.key).start();
    let steps = [
        "write -P 7 513 100000",
        "write -P 8 1M 1536",
        "write -z 2M 70000",
        "write -f -P 9 3000001 512",
        "discard 1M 64k",
        "flush",
    ];
    let with_steps = |words: &[&str]| {
        let mut command = tool("qemu-io");
        command.args(["-f", "raw"]).args(steps.iter().flat_map(|step| ["-c", step])).args(words);
        run(&mut command).success();
    };
    with_steps(&[server.uri()]);
    server.stop();
    with_steps(&[fixture.disk.str()]);
    let node = format!("driver=luks,key-secret=key,file.filename={}", image.display());
    // The discarded range may keep its data or not, so it is written again in both.
    let words = ["compare", "--object", &secret(&fixture.key), "--image-opts", &node];
    let other = format!("driver=raw,file.filename={}", fixture.disk.str());
    let compared = qemu_img(&[&words[..], &[&other]].concat());
    assert!(
        compared.stdout.contains("identical") || compared.stdout.contains("offset 1048576"),
        "{}",
        compared.stdout
    );
}

#[test]
fn without_its_key_a_container_is_only_looked_at() {
    require!(need::tools(&["qemu-img"]));
    let fixture = Fixture::new();
    let image = fixture.of_qemu("locked.luks", "");
    command(&["info", str(&image)]).success();
    command(&["compare", str(&image), fixture.disk.str()]).failure("--key-file FILE");
    fixture.convert(&image, &fixture.other_key()).failure("the key opens none of its 1 key slots");
    let refused = Serve::new(&fixture.scratch, &image).option("--key-file", fixture.other_key());
    refused.refused().failed(&["the key opens none"]);
    // The container is not taken for a raw disk, and no secret is shown.
    let raw = fixture.scratch.path("container");
    std::fs::copy(&image, &raw).expect("a copy");
    let looked = command(&["info", str(&raw)]).success();
    assert!(looked.stderr.contains("looks like luks"), "{}", looked.describe("says so"));
    let named = raw.with_extension("img");
    std::fs::copy(&image, &named).expect("a copy");
    command(&["info", str(&named)]).failure("say --format luks");
    let told = command(&["-vv", "info", str(&image)]).success();
    assert!(!told.stdout.contains("not a line") && !told.stderr.contains("not a line"));
}

/// Changes bytes of a copy of an image.
fn changed(image: &Path, name: &str, at: usize, bytes: &[u8]) -> PathBuf {
    let copy = image.with_file_name(name);
    let mut content = std::fs::read(image).expect("it is there");
    content[at..at + bytes.len()].copy_from_slice(bytes);
    std::fs::write(&copy, content).expect("a copy");
    copy
}

#[test]
fn damaged_headers_and_absurd_costs_are_one_line() {
    require!(need::tools(&["qemu-img"]));
    let fixture = Fixture::new();
    let image = fixture.of_qemu("good.luks", "");
    for (name, at, bytes, why) in [
        ("version.luks", 6, &[0, 9][..], "its version 9"),
        ("cipher.luks", 8, b"rot13", "cipher 'rot13"),
        ("hash.luks", 72, b"md5\0\0\0", "the hash 'md5'"),
        ("length.luks", 108, &[0xff; 4], "bytes is not 16 to 64"),
        ("slot.luks", 208, &[1; 4], "is marked 0x01010101"),
        ("iterations.luks", 212, &[0xff; 4], "4294967295 iterations, which is more"),
        ("rounds.luks", 164, &[0xff; 4], "4294967295 iterations, which is more"),
        ("none.luks", 164, &[0; 4], "no iterations"),
        ("offset.luks", 248, &[0xff; 4], "past the end of the header"),
        ("stripes.luks", 252, &[0xff; 4], "stripes are not 1 to"),
        ("payload.luks", 104, &[0xff; 4], "ends before its disk"),
        ("detached.luks", 104, &[0; 4], "its disk at offset 0 overlaps it"),
    ] {
        let outcome = fixture.convert(&changed(&image, name, at, bytes), &fixture.key).failure(why);
        assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
    }
    let slots = (0..8).map(|slot| 208 + slot * 48);
    let mut content = std::fs::read(&image).expect("it is there");
    slots.for_each(|at| content[at..at + 4].copy_from_slice(&[0, 0, 0xde, 0xad]));
    let empty = fixture.scratch.image_of("empty.luks", &content);
    fixture.convert(empty.path(), &fixture.key).failure("no key slot in use");
    let cut = fixture.scratch.image_of("cut.luks", &content[..700]);
    fixture.convert(cut.path(), &fixture.key).failure("ends before its disk");
}

#[test]
fn a_damaged_copy_of_a_header_is_replaced_by_the_other_one() {
    require!(need::tools(&["cryptsetup"]));
    let fixture = Fixture::new();
    let pbkdf2 = ["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"];
    let image = fixture.of_cryptsetup("good.img", &pbkdf2);
    // Damages the JSON, the checksum or the magic of the header's first copy.
    for (name, at) in [("json.img", 4200), ("checksum.img", 450), ("magic.img", 0)] {
        fixture.assert_holds_disk(&changed(&image, name, at, b"????"));
    }
    let both = changed(&changed(&image, "one.img", 4200, b"????"), "both.img", 16384 + 4200, b"?");
    fixture.convert(&both, &fixture.key).failure("its checksum is wrong");
}

#[test]
fn memory_beyond_the_limit_is_not_taken() {
    require!(need::tools(&["cryptsetup", "python3"]));
    let fixture = Fixture::new();
    let argon2 = ["--pbkdf-memory", "32768", "--pbkdf-force-iterations", "4"];
    let image = fixture.of_cryptsetup("good.img", &argon2);
    for (from, to, why) in [
        ("\"memory\":32768", "\"memory\":3000000000", "2929687 MiB of memory"),
        ("\"time\":4,", "\"time\":4000000000,", "4000000000 passes"),
        ("\"cpus\":", "\"cpus\":9999", "lanes in"),
        ("\"stripes\":4000", "\"stripes\":0", "stripes are not"),
        ("argon2id", "scrypt", "the key derivation 'scrypt' is not supported"),
    ] {
        let sealed = image.with_file_name("sealed.img");
        std::fs::copy(&image, &sealed).expect("a copy");
        // Changes both copies of the JSON, and corrects their checksums.
        let program = "
import sys, hashlib
path, old, new = sys.argv[1:]
with open(path, 'r+b') as file:
    for start in (0, 16384):
        file.seek(start)
        copy = bytearray(file.read(16384))
        json = bytes(copy[4096:]).split(b'\\0')[0]
        assert old.encode() in json, json
        json = json.replace(old.encode(), new.encode(), 1)
        copy[4096:] = json.ljust(12288, b'\\0')
        copy[448:512] = bytes(64)
        copy[448:480] = hashlib.sha256(copy).digest()
        file.seek(start)
        file.write(copy)
";
        run(Command::new("python3").args(["-c", program]).arg(&sealed).args([from, to])).success();
        let outcome = fixture.convert(&sealed, &fixture.key).failure(why);
        assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
    }
}

/// Options for a new encrypted qcow2 image of ours.
pub(crate) const ENCRYPTED: [&str; 3] =
    ["-o", "encrypt.format=luks,encrypt.iter-time=10", "--key-file"];

/// An image of this format as a QEMU block node, with its key.
pub(crate) fn node(driver: &str, key: &str, image: &Path) -> String {
    format!("driver={driver},{key}=key,file.filename={}", image.display())
}

#[track_caller]
fn assert_qemu_reads(fixture: &Fixture, image: &Path, raw: &Path) {
    let node = node("qcow2", "encrypt.key-secret", image);
    let other = format!("driver=raw,file.filename={}", raw.display());
    let words = ["compare", "--object", &secret(&fixture.key), "--image-opts", &node, &other];
    qemu_img(&words).success();
    let words = ["check", "--object", &secret(&fixture.key), "--image-opts", &node];
    qemu_img(&words).success();
    command(&["check", str(image)]).success();
}

#[test]
fn qcow2_images_of_qemu_convert_equal() {
    require!(need::tools(&["qemu-img"]));
    let fixture = Fixture::new();
    for (index, options) in [
        "",
        ",cluster_size=512",
        ",compat=0.10",
        ",extended_l2=on,cluster_size=128k",
        ",encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv,encrypt.ivgen-hash-alg=sha256",
    ]
    .into_iter()
    .enumerate()
    {
        let image = fixture.scratch.path(&format!("{index}.qcow2"));
        let options =
            format!("encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10{options}");
        let secret = secret(&fixture.key);
        let words = ["convert", "-f", "raw", "-O", "qcow2", "--object", &secret, "-o", &options];
        make_by_qemu(&[&words[..], &[fixture.disk.str(), str(&image)]].concat());
        command(&["check", str(&image)]).success();
        let compare = ["compare", "--key-file", str(&fixture.key), str(&image), fixture.disk.str()];
        command(&compare).success();
        command(&["compare", str(&image), fixture.disk.str()]).failure("--key-file FILE");
        let info = printed(&command(&["info", "--json", str(&image)]).success());
        assert_eq!(info["encrypted"], true);
    }
}

#[test]
fn qcow2_images_of_ours_open_in_qemu() {
    require!(need::tools(&["qemu-img"]));
    let fixture = Fixture::new();
    // An absolute name, because QEMU resolves others relative to its working folder.
    let data_file = format!("data_file={}", str(&fixture.scratch.path("data.raw")));
    for (index, options) in
        ["cluster_size=64K", "cluster_size=4K", "extended_l2=on", "compat=0.10", &data_file]
            .into_iter()
            .enumerate()
    {
        let image = fixture.scratch.path(&format!("{index}.qcow2"));
        let options = ["convert", "-f", "raw", "-o", options];
        let words =
            [&options[..], &ENCRYPTED, &[str(&fixture.key), fixture.disk.str(), str(&image)]];
        command(&words.concat()).success();
        assert_qemu_reads(&fixture, &image, fixture.disk.path());
    }
    let image = fixture.scratch.path("none.qcow2");
    command(&["create", "-o", "encrypt.format=luks", str(&image), "1M"]).failure("--key-file FILE");
    assert!(!image.exists());
}

/// An encrypted overlay over an encrypted image of the disk. Returns both, the image first.
fn overlay_of(fixture: &Fixture) -> (PathBuf, PathBuf) {
    let (base, overlay) = (fixture.scratch.path("base.qcow2"), fixture.scratch.path("top.qcow2"));
    let key = str(&fixture.key);
    command(
        &[&["convert", "-f", "raw"], &ENCRYPTED[..], &[key, fixture.disk.str(), str(&base)]]
            .concat(),
    )
    .success();
    let backing = ["create", "-b", "base.qcow2", "-F", "qcow2"];
    command(&[&backing[..], &ENCRYPTED, &[key, str(&overlay), &SIZE.to_string()]].concat())
        .success();
    (base, overlay)
}

#[test]
fn a_streamed_overlay_holds_the_disk_encrypted() {
    require!(need::tools(&["qemu-img"]));
    let fixture = Fixture::new();
    let (base, overlay) = overlay_of(&fixture);
    let control = fixture.scratch.socket("control");
    let serve = Serve::new(&fixture.scratch, &overlay).option("--key-file", &fixture.key);
    let server = serve.option("--control", &control).start();
    let ctl = |words: &[&str]| command(&[&["ctl", str(&control)], words].concat()).success();
    ctl(&["stream", "top.qcow2", "--job", "s"]);
    ctl(&["job", "s", "complete"]);
    server.stop();
    std::fs::remove_file(base).expect("nothing needs it");
    assert_qemu_reads(&fixture, &overlay, fixture.disk.path());
}

#[test]
fn an_encrypted_overlay_goes_into_a_plain_base_only_if_that_is_meant() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let fixture = Fixture::new();
    let overlay = fixture.scratch.path("top.qcow2");
    let backing = ["create", "-b", "disk.raw", "-F", "raw"];
    let words = [&backing[..], &ENCRYPTED, &[str(&fixture.key), str(&overlay), &SIZE.to_string()]];
    command(&words.concat()).success();
    let control = fixture.scratch.socket("control");
    let serve = Serve::new(&fixture.scratch, &overlay).option("--key-file", &fixture.key);
    let server = serve.option("--control", &control).start();
    let write = |target: &str| {
        run(tool("qemu-io").args(["-f", "raw", "-c", "write -P 7 64k 64k", target])).success();
    };
    write(server.uri());
    let ctl = |words: &[&str]| command(&[&["ctl", str(&control)], words].concat());
    ctl(&["commit", "top.qcow2"]).failure("in the clear");
    ctl(&["commit", "top.qcow2", "--decrypt", "--job", "c"]).success();
    ctl(&["job", "c", "complete"]).success();
    server.stop();
    let content = fixture.disk.content();
    assert!(content[64 << 10..128 << 10].iter().all(|byte| *byte == 7), "the base has it");
}

/// Whether cryptsetup opens a container with this key; nothing is mapped.
fn cryptsetup_opens(image: &Path, key: &Path) -> Outcome {
    let mut open = tool("cryptsetup");
    open.args(["open", "--test-passphrase", "--type", "luks1", "--disable-locks", "--key-file"]);
    run(open.arg(key).arg(image).arg("test"))
}

#[test]
fn new_containers_open_in_qemu_and_cryptsetup() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let fixture = Fixture::new();
    let (key, size) = (str(&fixture.key), SIZE.to_string());
    let object = secret(&fixture.key);
    let other = format!("secret,id=other,file={}", fixture.other_key().display());
    let qemu = ["--object", &object, "--object", &other, "-o", "key-secret=key,iter-time=10"];
    for (index, words) in [
        &["create", "--key-file", key, "-o", "iter-time=10"][..],
        // In qemu-img's form, where `key-secret` does not name the first secret.
        &[
            &["create", "-f", "luks", "--object", &other, "--object", &object, "-o"][..],
            &["key-secret=key,iter-time=10,cipher-alg=aes-256,hash-alg=sha256"],
        ]
        .concat(),
    ]
    .into_iter()
    .enumerate()
    {
        let image = fixture.scratch.path(&format!("new{index}.luks"));
        command(&[words, &[str(&image), &size]].concat()).success();
        let info = printed(&qemu_img(&["info", "--output=json", str(&image)]).success());
        assert_eq!((&info["format"], &info["virtual-size"]), (&"luks".into(), &SIZE.into()));
        assert_eq!(
            printed(&command(&["info", "--json", str(&image)]).success())["virtual-size"],
            SIZE
        );
        // Blockhouse reads what QEMU writes to the container.
        let node = format!("driver=luks,key-secret=key,file.filename={}", image.display());
        let convert = ["convert", "-n", "-f", "raw", "--object", &object, "--target-image-opts"];
        qemu_img(&[&convert[..], &[fixture.disk.str(), &node]].concat()).success();
        fixture.assert_holds_disk(&image);
        fixture.convert(&image, &fixture.other_key()).failure("opens none of its 1 key slots");
        if need::tools(&["cryptsetup"]).is_ok() {
            cryptsetup_opens(&image, &fixture.key).success();
            assert!(!cryptsetup_opens(&image, &fixture.other_key()).status.success());
        }
    }
    // Copies a disk with zeros and data into a container and out of it.
    let mut content = fixture.disk.content();
    content[1 << 20..3 << 20].fill(0);
    std::fs::write(fixture.disk.path(), &content).expect("written");
    let image = fixture.scratch.path("copy.luks");
    command(&[&["convert", "-O", "luks"], &qemu[..], &[fixture.disk.str(), str(&image)]].concat())
        .success();
    fixture.assert_holds_disk(&image);
    let node = format!("driver=luks,key-secret=key,file.filename={}", image.display());
    let raw = format!("driver=raw,file.filename={}", fixture.disk.str());
    qemu_img(&["compare", "--object", &object, "--image-opts", &node, &raw]).success();
    let measured = command(&["measure", "-O", "luks", "--json", "--size", &size]).success();
    let length = std::fs::metadata(&image).expect("it is there").len();
    assert_eq!(printed(&measured)["required"], length);
}

#[test]
fn what_a_new_container_cannot_be_is_told() {
    let fixture = Fixture::new();
    let (image, object) = (fixture.scratch.path("new.luks"), secret(&fixture.key));
    let key = str(&fixture.key);
    for (words, said) in [
        (&["--key-file", key, "-o", "detached-header=on"][..], "detached-header is always off"),
        (&["--key-file", key, "-o", "cipher-alg=serpent-256"], "always aes-256"),
        (&["--key-file", key, "-o", "cluster_size=4K"], "key-secret and iter-time"),
        (&["--object", &object, "-o", "key-secret=none"], "there is no secret 'none'"),
        (&["--object", "secret,id=key,data=word"], "every user of this host"),
        (&["-o", "iter-time=10"], "--key-file FILE"),
    ] {
        let outcome = command(&[&["create"], words, &[str(&image), "1M"]].concat()).failure(said);
        assert!(!image.exists(), "{}", outcome.describe("no file is left"));
    }
    command(&["create", "--key-file", key, str(&image)]).failure("the size is missing");
    command(&["convert", "-c", "--key-file", key, fixture.disk.str(), str(&image)]).failure("-c");
    command(&["convert", "--key-file", key, "-", str(&image)]).failure("say -n");
    let header = format!("driver=luks,file.filename={key},header.driver=file,header.filename=h");
    command(&["info", "--image-opts", &header]).failure("a LUKS header in another file");
}

#[test]
fn an_offline_commit_into_a_plain_base_is_meant_or_refused() {
    let fixture = Fixture::new();
    let overlay = fixture.scratch.path("top.qcow2");
    let backing = ["create", "-b", "disk.raw", "-F", "raw"];
    let words = [&backing[..], &ENCRYPTED, &[str(&fixture.key), str(&overlay), &SIZE.to_string()]];
    command(&words.concat()).success();
    let key = ["--key-file", str(&fixture.key), str(&overlay)];
    let commit = |words: &[&str]| command(&[&["commit"], words, &key].concat());
    let before = fixture.disk.state();
    commit(&[]).failure("say --decrypt");
    commit(&["-b", fixture.disk.str()]).failure("in the clear");
    assert_eq!(fixture.disk.state(), before, "nothing is written");
    commit(&["--decrypt"]).success();
}

#[test]
fn an_encrypted_overlay_is_written_copied_and_snapshotted() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let fixture = Fixture::new();
    let (base, overlay) = overlay_of(&fixture);
    let key = str(&fixture.key);
    let steps = [
        "write -P 1 513 3000",
        "write -P 2 200k 64k",
        "write -z 300k 200k",
        "write -z 1000k 5k",
        "write -P 3 1001k 700",
        "write -f -P 4 2M 512",
        "flush",
    ];
    let with_steps = |target: &str, steps: &[&str]| {
        let mut command = tool("qemu-io");
        command.args(["-f", "raw"]).args(steps.iter().flat_map(|step| ["-c", step])).arg(target);
        run(&mut command).success();
    };
    let serve =
        || Serve::new(&fixture.scratch, &overlay).option("--key-file", &fixture.key).start();
    let server = serve();
    with_steps(server.uri(), &steps[..4]);
    server.stop();
    with_steps(fixture.disk.str(), &steps[..4]);
    let before = fixture.scratch.image_of("before.raw", &fixture.disk.content());
    command(&["snapshot", "create", str(&overlay), "one"]).success();
    let server = serve();
    with_steps(server.uri(), &steps[4..]);
    server.stop();
    with_steps(fixture.disk.str(), &steps[4..]);
    // A backing file needs its key, too.
    let key_of_backing =
        node("qcow2", "encrypt.key-secret", &overlay) + ",backing.encrypt.key-secret=key";
    let raw = format!("driver=raw,file.filename={}", fixture.disk.str());
    let words =
        ["compare", "--object", &secret(&fixture.key), "--image-opts", &key_of_backing, &raw];
    qemu_img(&words).success();
    let out = fixture.scratch.path("one.raw");
    command(&["convert", "--key-file", key, "--snapshot", "one", str(&overlay), str(&out)])
        .success();
    assert!(
        std::fs::read(&out).expect("it was made") == before.content(),
        "another disk in the snapshot"
    );
    command(&["check", str(&overlay)]).success();
    command(&["commit", "--key-file", key, str(&overlay)]).success();
    assert_qemu_reads(&fixture, &base, fixture.disk.path());
}

#[test]
fn what_encryption_does_not_go_with_is_refused() {
    require!(need::tools(&["qemu-img"]));
    let fixture = Fixture::new();
    let (image, key) = (fixture.scratch.path("a.qcow2"), str(&fixture.key));
    for (option, why) in [
        ("compat=0.10,preallocation=metadata", "version 2"),
        ("encrypt.key-secret=key", "there is no secret"),
        ("encrypt.format=serpent", "use luks"),
    ] {
        let words = [&["create"], &ENCRYPTED[..], &[key, "-o", option, str(&image), "1M"]].concat();
        let refused = command(&words);
        assert!(
            !refused.status.success() && refused.stderr.contains(why),
            "{}",
            refused.describe(why)
        );
        assert!(!image.exists());
    }
    let compress =
        [&["convert", "-c", "-f", "raw"], &ENCRYPTED[..], &[key, fixture.disk.str(), str(&image)]];
    command(&compress.concat()).failure("not encrypted");
}

#[test]
fn what_is_preallocated_reads_as_zeros_until_it_is_written() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let fixture = Fixture::new();
    let key = str(&fixture.key);
    for mode in ["metadata", "falloc", "full"] {
        let image = fixture.scratch.path(&format!("{mode}.qcow2"));
        let option = format!("preallocation={mode}");
        let words =
            [&["create"], &ENCRYPTED[..], &[key, "-o", &option, str(&image), "1M"]].concat();
        command(&words).success();
        let zeros = fixture.scratch.path(&format!("{mode}.raw"));
        std::fs::write(&zeros, vec![0; 1 << 20]).expect("a file");
        assert_qemu_reads(&fixture, &image, &zeros);
        command(&["check", str(&image)]).success();
    }
}

#[test]
fn keys_are_added_and_erased_and_the_last_one_stays() {
    require!(need::tools(&["qemu-img"]));
    let fixture = Fixture::new();
    let (old, new) = (str(&fixture.key), fixture.scratch.path("new.key"));
    std::fs::write(&new, "another word").expect("a key");
    let objects =
        [format!("secret,id=old,file={old}"), format!("secret,id=new,file={}", str(&new))];
    let container = fixture.of_qemu("slots.luks", "");
    let image = fixture.scratch.path("slots.qcow2");
    command(&[&["create"], &ENCRYPTED[..], &[old, str(&image), "1M"]].concat()).success();
    let by_number_too = "state=inactive,keyslot=0,old-secret=old";
    for (disk, prefix, erase) in
        [(&container, "", "state=inactive,old-secret=old"), (&image, "encrypt.", by_number_too)]
    {
        let amend = |change: &str| {
            let changes: Vec<_> =
                change.split(',').map(|one| format!("{prefix}{one}")).collect::<Vec<_>>();
            let [one, other] = [&objects[0], &objects[1]];
            let changes = changes.join(",");
            command(&["amend", "--object", one, "--object", other, "-o", &changes, str(disk)])
        };
        let opens = |key: &str| {
            let copy = fixture.scratch.path("opened.raw");
            let _ = std::fs::remove_file(&copy);
            command(&["convert", "--key-file", key, str(disk), str(&copy)]).status.success()
        };
        assert!(opens(old) && !opens(str(&new)));
        amend("state=active,new-secret=new,iter-time=10").success();
        assert!(opens(old) && opens(str(&new)), "both keys open it");
        amend("state=active,new-secret=new,keyslot=0").failure("erase it first");
        amend("state=inactive,keyslot=0,old-secret=new").failure("does not open the key slot 0");
        amend("state=active,new-secret=new,old-secret=old").failure("leave it out");
        assert!(opens(old) && opens(str(&new)), "nothing has changed");
        amend(erase).success();
        assert!(!opens(old) && opens(str(&new)), "only the new key opens it");
        amend("state=inactive,keyslot=1").failure("all data would be lost");
        assert!(opens(str(&new)));
    }
}

#[test]
fn a_container_becomes_longer_and_shorter_with_its_file() {
    require!(need::tools(&["qemu-img"]));
    let fixture = Fixture::new();
    let container = fixture.of_qemu("resized.luks", "");
    let before = std::fs::metadata(&container).expect("a file").len();
    let key = str(&fixture.key);
    let resize = |size: &str, shrink: &[&str]| {
        let words = [&["resize", "--key-file", key], shrink, &[str(&container), size]];
        command(&words.concat()).success();
        std::fs::metadata(&container).expect("a file").len()
    };
    assert_eq!(resize("+1M", &[]), before + (1 << 20));
    assert_eq!(resize("-1M", &["--shrink"]), before);
    let copy = fixture.scratch.path("resized.raw");
    command(&["convert", "--key-file", key, str(&container), str(&copy)]).success();
    let [copy, disk] = [copy.as_path(), fixture.disk.path()].map(|path| std::fs::read(path).ok());
    assert!(copy == disk, "the disk is as it was");
}

#[test]
fn a_server_in_its_sandbox_keeps_the_keys_of_later_disks_in_memory() {
    require!(need::tools(&["qemu-img"]));
    let fixture = Fixture::new();
    let image = fixture.of_qemu("later.luks", "");
    let control = fixture.scratch.socket("control");
    let server =
        Serve::new(&fixture.scratch, fixture.disk.path()).option("--control", &control).start();
    let mut client = blockhouse_tests::control::Control::connect(&control);
    let open = serde_json::json!({ "path": str(&image), "key-files": [str(&fixture.key)] });
    client.get("disk.open", open);
    assert!(!server.log().contains("cannot be locked"), "{}", server.log());
    server.stop();
}
