//! Servers that are killed, and what the next program finds: every acknowledged change of a qcow2
//! image, or a message about missing changes.

use std::fs::{self, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use blockhouse_tests::image_tool::{command, json, qemu_img, qemu_io, str};
use blockhouse_tests::nbd::{Address, Client, command as nbd_command};
use blockhouse_tests::upgrade::{Servers, upgrade_in_the_end};
use blockhouse_tests::{LoopDevice, Scratch, Serve, Server, eventually, need, require};
use rustix::process::Signal;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
/// An offset in a cluster that no other write touches.
const ZEROED: u64 = 8 * MIB;

/// An image whose server is killed, and its state folder.
struct Victim {
    scratch: Scratch,
    image: PathBuf,
    state: TempDir,
}

impl Victim {
    fn new(options: &str) -> Self {
        let scratch = Scratch::new();
        let image = scratch.path("disk.qcow2");
        let data = scratch.path("data.raw");
        let options = options.replace("DATA", str(&data));
        command(&["create", "--format", "qcow2", "-o", &options, str(&image), "64M"]).success();
        let state = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        Self { scratch, image, state }
    }

    /// A server that keeps its state in a directory of this test.
    fn serve(&self) -> Serve {
        Serve::new(&self.scratch, &self.image).option("--state", self.state.path().join("state"))
    }

    /// Makes changes that are acknowledged and not flushed, and kills the server.
    fn kill(&self, server: Server) {
        let mut client = Client::open(&server.address());
        assert_eq!(client.write(ZEROED, &[9; 65536], 0), 0);
        assert_eq!(client.flush(), 0);
        self.change(&server.address());
        kill_idle(server);
    }

    /// Makes changes that are acknowledged and not flushed.
    fn change(&self, address: &Address) {
        let mut client = Client::open(address);
        for block in 0..16 {
            assert_eq!(client.write(block * 300_032, &pattern(block), 0), 0);
        }
        assert_eq!(client.simple(nbd_command::WRITE_ZEROES, ZEROED, 65536, 0), 0);
    }

    /// Whether all acknowledged changes are there.
    fn is_whole(server: &Server) -> bool {
        let mut client = Client::open(&server.address());
        let is_there = |block: u64, client: &mut Client| {
            client.read(block * 300_032, 4096).expect("a read") == pattern(block)
        };
        let zeros = client.read(ZEROED, 65536).expect("a read");
        (0..16).all(|block| is_there(block, &mut client)) && zeros == [0; 65536]
    }

    /// The names in a state directory.
    fn files(&self) -> Vec<String> {
        names(&self.state.path().join("state"))
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Waits until the server's log, which a separate thread writes, has these words.
fn wait_for_log(server: &Server, words: &[&str]) {
    let has_all = || words.iter().all(|word| server.log().contains(word));
    assert!(
        eventually(Duration::from_secs(10), has_all),
        "{words:?} are expected: {}",
        server.log()
    );
}

fn pattern(block: u64) -> Vec<u8> {
    vec![block as u8 + 1; 4096]
}

#[test]
fn what_a_killed_server_answered_is_there_when_it_starts_again() {
    for options in [
        "cluster_size=65536",
        "compat=0.10",
        "extended_l2=on",
        "cluster_size=4096,lazy_refcounts=on",
        "data_file=DATA",
    ] {
        let victim = Victim::new(options);
        victim.kill(victim.serve().start());
        let [file] = &victim.files()[..] else { panic!("one state file: {:?}", victim.files()) };
        let image = fs::metadata(&victim.image).expect("the image");
        assert_eq!(*file, format!("{:x}-{:x}", image.dev(), image.ino()));
        // Twice: the second server is killed before it has changed anything.
        for _ in 0..2 {
            let mut server = victim.serve().start();
            assert!(Victim::is_whole(&server), "{options}: {}", server.log());
            server.signal(Signal::KILL);
            server.wait(Duration::from_secs(20));
        }
        let server = victim.serve().start();
        assert!(Victim::is_whole(&server), "{options}");
        server.stop();
        assert_eq!(victim.files(), [""; 0], "{options}: closed in order");
        command(&["check", str(&victim.image)]).success();
    }
}

#[test]
fn the_server_says_what_it_found() {
    let victim = Victim::new("cluster_size=65536");
    victim.kill(victim.serve().flag("--verbose").start());
    let server = victim.serve().flag("--verbose").start();
    wait_for_log(&server, &["changes are in the image now that process", "answers are kept in"]);
    server.stop();
}

#[test]
fn without_state_the_changes_are_lost() {
    let victim = Victim::new("cluster_size=65536");
    let serve = || Serve::new(&victim.scratch, &victim.image).option("--state", "off");
    victim.kill(serve().start());
    let server = serve().start();
    assert!(!Victim::is_whole(&server), "else the other tests show nothing");
    assert_eq!(server.log(), "", "that was wanted");
    server.stop();
}

#[test]
fn a_log_of_an_image_that_another_program_has_changed_is_refused() {
    require!(need::tools(&["qemu-io"]));
    for (options, pause) in [("cluster_size=65536", 0), ("compat=0.10", 4)] {
        let victim = Victim::new(options);
        victim.kill(victim.serve().start());
        // Only the modification time of a version 2 image shows the change.
        std::thread::sleep(Duration::from_secs(pause));
        qemu_io("qcow2", &victim.image, &["write -P 7 20M 64k"]);
        let server = victim.serve().start();
        let words = ["the redo log is refused: another program", ".refused", "file systems"];
        wait_for_log(&server, &words);
        assert!(!Victim::is_whole(&server));
        let mut client = Client::open(&server.address());
        assert_eq!(client.read(20 * MIB, 65536), Ok(vec![7; 65536]), "what QEMU wrote");
        drop(client);
        server.stop();
        let [kept] = &victim.files()[..] else { panic!("{:?}", victim.files()) };
        assert!(kept.ends_with(".refused"), "{kept}");
    }
}

/// An older copy that was made while the server ran has the session mark, too.
#[test]
fn a_log_is_not_replayed_on_an_older_copy_of_its_image() {
    for (options, is_made_while_served) in [("compat=0.10", false), ("compat=1.1", true)] {
        let victim = Victim::new(options);
        let before = SystemTime::now() - Duration::from_secs(3600);
        let mut copy = fs::read(&victim.image).expect("the image");
        let server = victim.serve().start();
        if is_made_while_served {
            let mut client = Client::open(&server.address());
            assert_eq!(client.write(0, &[1; 4096], 0), 0);
            assert_eq!(client.flush(), 0);
            copy = fs::read(&victim.image).expect("the image");
        }
        victim.kill(server);
        let file = fs::File::options().write(true).open(&victim.image).expect("the image");
        file.set_len(0).expect("it is ours");
        file.write_all_at(&copy, 0).expect("room");
        file.set_modified(before).expect("it is ours");
        let server = victim.serve().start();
        wait_for_log(&server, &["the redo log is refused: an older copy", ".refused"]);
        server.stop();
        command(&["check", str(&victim.image)]).success();
    }
}

/// The modification time may be a little later: a write may be delayed in the kernel, and the clock
/// of a file system on another host may be ahead.
#[test]
fn an_image_that_says_whose_it_is_may_be_modified_a_little_later() {
    let victim = Victim::new("cluster_size=65536");
    victim.kill(victim.serve().start());
    let file = fs::File::options().write(true).open(&victim.image).expect("the image");
    file.set_modified(SystemTime::now() + Duration::from_secs(20)).expect("it is ours");
    let server = victim.serve().start();
    assert!(Victim::is_whole(&server), "{}", server.log());
    victim.kill(server);
    file.set_modified(SystemTime::now() + Duration::from_secs(3600)).expect("it is ours");
    let server = victim.serve().start();
    wait_for_log(&server, &["the redo log is refused: another program", ".refused"]);
    server.stop();
}

#[test]
fn a_server_with_another_directory_says_that_changes_may_be_missing() {
    let victim = Victim::new("cluster_size=65536");
    victim.kill(victim.serve().start());
    let other = victim.state.path().join("other");
    let server = Serve::new(&victim.scratch, &victim.image).option("--state", &other).start();
    wait_for_log(&server, &["--state", "may be missing"]);
    drop(server);
    assert_eq!(victim.files().len(), 1, "the file of the first server is as it was");
}

#[test]
fn a_directory_that_cannot_be_used_is_refused() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let memory = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    fs::set_permissions(memory.path(), Permissions::from_mode(0o755)).expect("it is ours");
    let refused = |dir: &Path, words: &[&str]| {
        Serve::new(&scratch, image.path()).option("--state", dir).refused().failed(words);
    };
    refused(memory.path(), &["chmod 700"]);
    refused(&memory.path().join("missing/state"), &["cannot make the state directory", "--state"]);
    refused(Path::new("/proc/state"), &["/proc/state", "--state off"]);
    refused(&scratch.path("state"), &["tmpfs", "--state off"]);
    fs::set_permissions(memory.path(), Permissions::from_mode(0o700)).expect("it is ours");
    // A directory with a state file's name is moved aside.
    let about = fs::metadata(image.path()).expect("the image");
    let name = format!("{:x}-{:x}", about.dev(), about.ino());
    fs::create_dir(memory.path().join(&name)).expect("a directory");
    let server = Serve::new(&scratch, image.path()).option("--state", memory.path()).start();
    wait_for_log(&server, &["the state file is refused"]);
    server.stop();
    assert_eq!(names(memory.path()), [format!("{name}.refused")]);
}

#[test]
fn commands_leave_an_image_alone_whose_state_may_be_elsewhere() {
    let victim = Victim::new("cluster_size=65536");
    victim.kill(victim.serve().start());
    let (image, state) = (str(&victim.image), victim.state.path().join("state"));
    let before = fs::read(&victim.image).expect("the image");
    for words in [&["check", "--repair", "all", image][..], &["resize", image, "128M"]] {
        let refused = command(words).failure("its last server kept a state file");
        for hint in ["--state directory of that server", "--state off"] {
            assert!(refused.stderr.contains(hint), "{}", refused.describe(hint));
        }
    }
    assert!(fs::read(&victim.image).expect("the image") == before, "nothing is changed");
    for words in [&["check", image][..], &["info", image], &["info", "--json", image]] {
        let said = command(words).success().stderr;
        assert!(said.contains("may be missing"), "{said}");
    }
    let copy = victim.scratch.path("copy.img");
    for words in [&["map", image][..], &["convert", image, str(&copy)]] {
        command(words).failure("--state directory of that server");
    }
    let words = ["resize", image, "128M", "--state", str(&state)];
    let said = command(&words).success().stderr;
    assert!(said.contains("changes are in the image now"), "{said}");
    for what in ["check", "info"] {
        assert_eq!(command(&[what, image]).success().stderr, "", "closed in order");
    }
    victim.kill(victim.serve().start());
    let said = command(&["resize", image, "160M", "--state", "off"]).success().stderr;
    assert!(said.contains("may be missing"), "that was wanted: {said}");
    // The redo log no longer fits the image.
    let server = victim.serve().start();
    wait_for_log(&server, &["the redo log is refused"]);
    server.stop();
}

/// After a reboot of the host there is no state file, and commands in scripts must still work.
#[test]
fn commands_change_an_image_whose_server_died_before_the_host_restarted() {
    let victim = Victim::new("cluster_size=65536");
    victim.kill(victim.serve().start());
    fs::remove_dir_all(victim.state.path().join("state")).expect("it is there");
    let file = fs::File::options().write(true).open(&victim.image).expect("the image");
    let years_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    file.set_modified(years_ago).expect("it is ours");
    let image = str(&victim.image);
    let said = command(&["map", image]).success().stderr;
    assert!(said.contains("the host has restarted since"), "{said}");
    let said = command(&["resize", image, "128M"]).success().stderr;
    assert!(said.contains("the host has restarted since"), "{said}");
    assert_eq!(command(&["check", image]).success().stderr, "");
}

/// Kills a server that keeps its state in the default folder, which commands use.
fn killed_with_usual_state() -> Victim {
    let victim = Victim::new("cluster_size=65536");
    victim.kill(Serve::new(&victim.scratch, &victim.image).start());
    victim
}

/// Changes of an image that another program has made anew since are lost: no command can bring them
/// back.
#[test]
fn commands_read_an_image_that_was_replaced_after_its_server_died() {
    require!(need::tools(&["qemu-img"]));
    let victim = killed_with_usual_state();
    let (image, copy) = (str(&victim.image), victim.scratch.path("copy.qcow2"));
    command(&["convert", image, str(&copy)]).failure("changes are missing that process");
    // The file, its inode and so the state file stay.
    qemu_img(&["create", "-q", "-f", "qcow2", image, "1M"]).success();
    for words in [&["convert", image, str(&copy)][..], &["check", image]] {
        let said = command(words).success().stderr;
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains("changes are lost that process"), "{said}");
    }
    assert_eq!(command(&["check", str(&copy)]).success().stderr, "");
}

/// The state of a server hides nothing that a later one has left in another directory.
#[test]
fn commands_refuse_an_image_whose_last_server_kept_its_state_elsewhere() {
    let victim = killed_with_usual_state();
    victim.kill(victim.serve().start());
    let copy = victim.scratch.path("copy.qcow2");
    let words = ["convert", str(&victim.image), str(&copy)];
    command(&words).failure("what was answered last would be lost");
    assert!(!copy.exists());
}

/// The second server brings the changes of the first into the image, and dies before a change of
/// its own. So the image still has the mark of the first server.
#[test]
fn commands_read_an_image_whose_next_server_died_before_its_first_change() {
    let victim = killed_with_usual_state();
    kill_idle(Serve::new(&victim.scratch, &victim.image).start());
    let copy = victim.scratch.path("copy.qcow2");
    let copied = command(&["convert", str(&victim.image), str(&copy)]).success();
    assert_eq!(copied.stderr, "");
}

#[test]
fn commands_refuse_an_image_whose_next_server_kept_its_state_elsewhere_and_changed_nothing() {
    let victim = killed_with_usual_state();
    kill_idle(victim.serve().start());
    let copy = victim.scratch.path("copy.qcow2");
    let state = victim.state.path().join("state");
    let words = ["convert", str(&victim.image), str(&copy), "--state", str(&state)];
    command(&words).failure("what was answered last would be lost");
    assert!(!copy.exists());
}

fn kill_idle(mut server: Server) {
    server.signal(Signal::KILL);
    server.wait(Duration::from_secs(20));
}

#[test]
fn commands_that_read_refuse_an_image_that_lacks_changes_and_those_that_look_say_so() {
    let victim = killed_with_usual_state();
    let image = str(&victim.image);
    let copy = victim.scratch.path("copy.qcow2");
    for words in [&["check", image][..], &["bitmap", "list", image], &["snapshot", "list", image]] {
        let said = command(words).success().stderr;
        assert_eq!(said.lines().count(), 1, "{words:?}: {said}");
        assert!(said.contains("changes are missing that process"), "{words:?}: {said}");
    }
    for words in [
        &["map", image][..],
        &["measure", "-O", "raw", image],
        &["compare", image, image],
        &["convert", image, str(&copy)],
        &["convert", "-U", image, str(&copy)],
        &["dd", &format!("if={image}"), &format!("of={}", str(&copy))],
        &["backup", image, str(&copy)],
        &["restore", image, str(&copy)],
    ] {
        command(words).failure("check --repair leaks");
        assert!(!copy.exists(), "{words:?}");
    }
    let serve = Serve::new(&victim.scratch, &victim.image).flag("--read-only");
    serve.refused().failed(&["changes are missing that process", "check --repair leaks"]);
    let found = json(&command(&["check", "--json", image]).success());
    let missing = &found["blockhouse"]["missing-changes"];
    assert!(missing["changes"].as_u64().expect("a number") > 0, "{found}");
    let said = command(&["info", image]).success();
    assert!(said.stdout.contains("missing changes: "), "{}", said.stdout);
    let found = json(&command(&["info", "--json", image]).success());
    let missing = &found["blockhouse"]["missing-changes"];
    assert!(missing["changes"].as_u64().expect("a number") > 0, "{found}");
    let server = Serve::new(&victim.scratch, &victim.image).start();
    assert!(Victim::is_whole(&server));
    let found = json(&command(&["info", "--json", image]).success());
    assert!(found["blockhouse"]["missing-changes"].is_null(), "it is served: {found}");
    server.stop();
    assert_eq!(command(&["check", image]).success().stderr, "");
}

#[test]
fn commands_that_write_begin_with_what_was_answered() {
    require!(need::tools(&["qemu-img"]));
    for words in [
        &["check", "--repair", "leaks", "IMAGE"][..],
        &["resize", "IMAGE", "128M"],
        &["snapshot", "create", "IMAGE", "one"],
    ] {
        let victim = killed_with_usual_state();
        let image = str(&victim.image);
        let words: Vec<&str> =
            words.iter().map(|&word| if word == "IMAGE" { image } else { word }).collect();
        let said = command(&words).success();
        assert!(said.stderr.contains("changes are in the image now"), "{}", said.describe("one"));
        let said = command(&["check", image]).success();
        assert_eq!(said.stderr, "", "{words:?}");
        qemu_img(&["check", image]).success();
        let server = Serve::new(&victim.scratch, &victim.image).start();
        assert!(Victim::is_whole(&server), "{words:?}");
        assert_eq!(server.log(), "", "{words:?}");
        server.stop();
    }
}

#[test]
fn commands_look_where_they_are_told() {
    let victim = Victim::new("cluster_size=65536");
    victim.kill(victim.serve().start());
    let (image, state) = (str(&victim.image), victim.state.path().join("state"));
    let check = |words: &[&str]| command(&[&["check", image], words].concat()).stderr;
    assert!(check(&["--state", str(&state)]).contains("changes are missing that process"));
    assert_eq!(check(&["--state", "off"]), "");
    let missing = victim.state.path().join("missing");
    let refused = command(&["map", "--state", str(&missing), image]);
    refused.failure("cannot open the state directory");
    let json_of = |words: &[&str]| json(&command(&[&["info", "--json", image], words].concat()));
    let found = json_of(&["--state", str(&state)]);
    assert!(found["blockhouse"]["missing-changes"]["changes"].as_u64() > Some(0), "{found}");
    assert!(json_of(&[])["blockhouse"]["missing-changes"].is_null());
    let said = command(&["check", "--repair", "leaks", "--state", str(&state), image]).success();
    assert!(said.stderr.contains("changes are in the image now"), "{}", said.describe("one"));
    let server = victim.serve().start();
    assert!(Victim::is_whole(&server));
    server.stop();
}

#[test]
fn an_image_over_one_that_lacks_answered_changes_is_not_opened_for_writing() {
    let victim = killed_with_usual_state();
    let base = str(&victim.image);
    let overlay = victim.scratch.path("overlay.qcow2");
    command(&["create", "-b", base, "-F", "qcow2", str(&overlay)]).success();
    let serve = || Serve::new(&victim.scratch, &overlay);
    let words = [base, "changes are missing that process", "check --repair leaks", "--state off"];
    serve().refused().failed(&words);
    for words in [&["map", str(&overlay)][..], &["convert", str(&overlay), "COPY"]] {
        let copy = victim.scratch.path("copy.raw");
        let words: Vec<&str> =
            words.iter().map(|&word| if word == "COPY" { str(&copy) } else { word }).collect();
        let refused = command(&words).failure("changes are missing that process");
        assert_eq!(refused.stderr.lines().count(), 1, "{}", refused.describe("one line"));
    }
    serve().option("--state", "off").start().stop();
    command(&["check", "--repair", "leaks", base]).success();
    let server = serve().start();
    assert!(Victim::is_whole(&server));
    assert_eq!(server.log(), "");
    server.stop();
}

/// The header byte with the lowest incompatible feature bits (docs/interop/qcow2.txt of QEMU), and
/// the corrupt bit.
const INCOMPATIBLE_BYTE: u64 = 79;
const CORRUPT_BIT: u8 = 2;

#[test]
fn a_corrupt_image_is_repaired_without_what_was_answered_which_is_kept() {
    let victim = killed_with_usual_state();
    let image = str(&victim.image);
    mark_corrupt(&victim.image);
    let serve = || Serve::new(&victim.scratch, &victim.image);
    serve().refused().failed(&["marked as corrupt", "check --repair all"]);
    command(&["check", "--repair", "leaks", image]).failure("check --repair all");
    let said = command(&["check", "--repair", "all", image]).success().stderr;
    assert_eq!(said.matches("the redo log is refused: the image is corrupt").count(), 1, "{said}");
    let aside = said.split_whitespace().find(|word| word.ends_with(".refused")).expect("its name");
    fs::remove_file(aside).expect("it is kept");
    let server = serve().start();
    assert_eq!(server.log(), "");
    server.stop();
}

#[test]
fn a_corrupt_image_whose_server_answered_nothing_is_repaired_in_silence() {
    let victim = Victim::new("cluster_size=65536");
    let mut server = Serve::new(&victim.scratch, &victim.image).start();
    server.signal(Signal::KILL);
    server.wait(Duration::from_secs(20));
    mark_corrupt(&victim.image);
    let said = command(&["check", "--repair", "all", str(&victim.image)]).success();
    assert!(!said.stderr.contains("refused"), "{}", said.describe("nothing is missing"));
    let server = Serve::new(&victim.scratch, &victim.image).start();
    assert_eq!(server.log(), "");
    server.stop();
}

fn mark_corrupt(image: &Path) {
    let file = fs::File::options().read(true).write(true).open(image).expect("the image");
    let mut bits = [0];
    file.read_exact_at(&mut bits, INCOMPATIBLE_BYTE).expect("a header");
    file.write_all_at(&[bits[0] | CORRUPT_BIT], INCOMPATIBLE_BYTE).expect("a header");
}

#[test]
fn a_state_file_of_a_device_before_it_was_attached_again_is_kept() {
    let victim = Victim::new("cluster_size=65536");
    let file = fs::File::options().write(true).open(&victim.image).expect("the image");
    file.set_len(128 * MIB).expect("room on the device");
    let device = require!(LoopDevice::over_file(&victim.image, &[]));
    let serve = || {
        let serve = Serve::new(&victim.scratch, device.path()).option("--format", "qcow2");
        serve.option("--state", victim.state.path().join("state"))
    };
    victim.kill(serve().start());
    let [name] = &victim.files()[..] else { panic!("one state file: {:?}", victim.files()) };
    device.attach_again(&victim.image);
    let server = serve().start();
    wait_for_log(&server, &["before it was attached again", &format!("{name}.refused")]);
    server.stop();
    assert_eq!(victim.files(), [format!("{name}.refused")]);
}

#[test]
fn an_upgraded_server_keeps_state_as_the_first_one_did() {
    let victim = Victim::new("cluster_size=65536");
    let control = victim.scratch.socket("control");
    let serve = || victim.serve().option("--control", &control);
    let servers = Servers(&victim.scratch);
    let mut server = serve().start();
    victim.change(&server.address());
    upgrade_in_the_end(&control, &[]);
    servers.wait_for(1);
    let second = servers.running()[0];
    assert_eq!(victim.files().len(), 1);
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(30 * MIB, &[3; 4096], 0), 0);
    rustix::process::kill_process(second, Signal::KILL).expect("it runs");
    servers.wait_for(0);
    server.wait(Duration::from_secs(20));
    let server = serve().start();
    assert!(Victim::is_whole(&server), "{}", server.log());
    let mut client = Client::open(&server.address());
    assert_eq!(client.read(30 * MIB, 4096), Ok(vec![3; 4096]));
    server.stop();
    assert_eq!(victim.files(), [""; 0]);
}

/// Any user may create the folder in `/dev/shm`. A server that only warned would run without a
/// state file.
#[test]
fn the_usual_state_directory_must_not_be_of_another_user() {
    require!(need::root());
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let taken = Path::new("/dev/shm/blockhouse-54321");
    fs::create_dir(taken).expect("the name is free");
    let refused = Serve::new(&scratch, image.path())
        .option("--user", "54321")
        .option("--group", "54321")
        .refused();
    fs::remove_dir(taken).expect("nothing is in it");
    refused.failed(&["/dev/shm/blockhouse-54321", "belongs to another user"]);
}
