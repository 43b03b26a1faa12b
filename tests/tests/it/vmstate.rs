//! `vmstate` with a real QEMU: a paused machine with 512 MiB of random memory, under software
//! emulation. Each program can load the state that the other stores.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use blockhouse_tests::{
    Outcome, Scratch, blockhouse,
    image_tool::{command, new_image, qemu_img, str},
    need, random_bytes, require, run, run_within, seeded, tool,
};

const MEMORY: u64 = 512 << 20;
const LIMIT: Duration = Duration::from_secs(120);

/// Makes a memory file with random content in three quarters of its pages.
fn memory_file(scratch: &Scratch, name: &str) -> PathBuf {
    let path = scratch.path(name);
    let mut file = File::create(&path).expect("a file");
    let noise = random_bytes(&mut seeded(), 1 << 20);
    for part in 0..MEMORY >> 20 {
        let mut bytes = noise.clone();
        // Every part differs from the others; in every other part half of the pages are zeros.
        for (number, page) in bytes.chunks_exact_mut(4096).enumerate() {
            page[..8].copy_from_slice(&(part << 20 | number as u64).to_be_bytes());
            if number % 2 == 1 && part % 2 == 1 {
                page.fill(0);
            }
        }
        file.write_all(&bytes).expect("room");
    }
    path
}

/// Runs a paused machine that executes monitor commands and then ends. Its memory is a file, so
/// that its content can be set before and read afterwards.
fn machine(memory: &Path, options: &[&str], commands: &str) -> Outcome {
    let script = memory.with_extension("monitor");
    std::fs::write(&script, format!("{commands}quit\n")).expect("room");
    machine_told_by(&format!("cat {}", str(&script)), memory, options)
}

/// The same, with the output of a shell command as the monitor's input.
fn machine_told_by(teller: &str, memory: &Path, options: &[&str]) -> Outcome {
    let backend =
        format!("memory-backend-file,id=m,share=on,size={MEMORY},mem-path={}", str(memory));
    let mut qemu = tool("sh");
    qemu.args(["-c", &format!("{{ {teller}; }} | qemu-system-x86_64 \"$@\""), "sh"]);
    qemu.args(["-machine", "pc,accel=tcg,memory-backend=m", "-object", &backend, "-m", "512"]);
    qemu.args(["-display", "none", "-nodefaults", "-S", "-monitor", "stdio"]).args(options);
    run_within(LIMIT, &mut qemu).success()
}

/// Streams the state of a paused machine into a shell command, and waits for the command's success:
/// QEMU itself does not wait for the command if `quit` follows at once.
fn migrate(memory: &Path, receiver: &str) {
    let (script, ended) = (memory.with_extension("monitor"), memory.with_extension("ended"));
    let receiver = format!("{receiver} 2>{0}.new; echo $? >>{0}.new; mv {0}.new {0}", str(&ended));
    let commands = format!(
        "migrate_set_parameter max-bandwidth 100G\nmigrate \"exec:{receiver}\"\ninfo migrate\n"
    );
    std::fs::write(&script, commands).expect("room");
    let teller = format!("cat {}; {}; echo quit", str(&script), until_exists(&ended));
    let migrated = machine_told_by(&teller, memory, &[]);
    assert!(!migrated.stdout.contains("failed"), "{}", migrated.describe("it migrates"));
    let said = std::fs::read_to_string(&ended).expect("the receiver's errors and exit status");
    assert_eq!(said, "0\n", "{}", migrated.describe("the receiver succeeds"));
}

/// A shell command that waits for a file, for a minute at most.
fn until_exists(file: &Path) -> String {
    format!("n=0; until [ -e {} ] || [ $((n += 1)) -gt 600 ]; do sleep 0.1; done", str(file))
}

fn drive(image: &Path) -> String {
    format!("if=none,id=d,format=qcow2,file={}", str(image))
}

fn same_memory(one: &Path, other: &Path) {
    let outcome = run(Command::new("cmp").args([one, other]));
    assert!(outcome.status.success(), "{}", outcome.describe("the memory must be the same"));
}

/// A memory file of zeros.
fn empty_memory(scratch: &Scratch, name: &str) -> PathBuf {
    let path = scratch.path(name);
    File::create(&path).and_then(|file| file.set_len(MEMORY)).expect("room");
    path
}

#[test]
fn qemu_and_we_exchange_the_state_of_a_machine() {
    require!(need::tools(&["qemu-img", "qemu-system-x86_64"]));
    let scratch = Scratch::new();
    let memory = memory_file(&scratch, "memory");
    let blockhouse = str(blockhouse());

    // Blockhouse stores a state that QEMU streams, and QEMU starts from it.
    let ours = new_image(&scratch, "ours.qcow2", "64M");
    migrate(&memory, &format!("{blockhouse} vmstate save {} one", str(&ours)));
    let listed = qemu_img(&["snapshot", "-l", str(&ours)]).success().stdout;
    assert!(listed.contains("one"), "{listed}");
    qemu_img(&["check", str(&ours)]).success();
    let restored = empty_memory(&scratch, "restored");
    machine(&restored, &["-drive", &drive(&ours), "-loadvm", "one"], "");
    same_memory(&memory, &restored);

    // QEMU loads our stream.
    let sent = scratch.path("sent");
    let incoming =
        format!("exec:{blockhouse} vmstate load {} one && touch {}", str(&ours), str(&sent));
    let received = empty_memory(&scratch, "restored");
    // When everything is sent, QEMU soon reads the rest of the pipe.
    let teller = format!("{}; sleep 3; echo quit", until_exists(&sent));
    machine_told_by(&teller, &received, &["-incoming", &incoming]);
    same_memory(&memory, &received);

    // Blockhouse reads a state that QEMU stored, byte for byte: it stores the state again, and QEMU
    // starts from that.
    let theirs = new_image(&scratch, "theirs.qcow2", "64M");
    machine(&memory, &["-drive", &drive(&theirs)], "savevm two\n");
    let listed = command(&["snapshot", "list", str(&theirs)]).success().stdout;
    assert!(listed.contains("two"), "{listed}");
    let copy = new_image(&scratch, "copy.qcow2", "64M");
    let script = format!(
        "{blockhouse} vmstate load {0} two | tee {2} | {blockhouse} vmstate save {1} two && \
         {blockhouse} vmstate load {1} two | cmp - {2}",
        str(&theirs),
        str(&copy),
        str(&scratch.path("stream"))
    );
    run_within(LIMIT, Command::new("sh").args(["-c", &script])).success();
    qemu_img(&["check", str(&copy)]).success();
    let again = empty_memory(&scratch, "restored");
    machine(&again, &["-drive", &drive(&copy), "-loadvm", "two"], "");
    same_memory(&memory, &again);
}

#[test]
fn packed_states_are_started_from_too() {
    require!(need::tools(&["qemu-img", "qemu-system-x86_64"]));
    let scratch = Scratch::new();
    let memory = memory_file(&scratch, "memory");
    let image = scratch.path("packed.qcow2");
    command(&["create", "-o", "compression_type=zstd", str(&image), "64M"]).success();
    let stream = scratch.path("stream");
    migrate(&memory, &format!("cat > {}", str(&stream)));
    let script = format!(
        "{} vmstate save --compress zstd {} one < {}",
        str(blockhouse()),
        str(&image),
        str(&stream)
    );
    run_within(LIMIT, Command::new("sh").args(["-c", &script])).success();
    qemu_img(&["check", str(&image)]).success();
    let restored = empty_memory(&scratch, "restored");
    machine(&restored, &["-drive", &drive(&image), "-loadvm", "one"], "");
    same_memory(&memory, &restored);
}

#[test]
fn a_state_that_ends_early_becomes_no_snapshot() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let image = new_image(&scratch, "disk.qcow2", "64M");
    let save = |stream: &[u8]| {
        let path = scratch.path("stream");
        std::fs::write(&path, stream).expect("room");
        let script = format!("exec \"$0\" vmstate save {} one < {}", str(&image), str(&path));
        run(Command::new("sh").args(["-c", &script, str(blockhouse())]))
    };
    let mut random = seeded();
    let half = [&b"QEVM"[..], &random_bytes(&mut random, 5 << 20)].concat();
    for (stream, words) in [(&half[..], "ends early"), (&[], "standard input had nothing")] {
        let outcome = save(stream);
        let said = outcome.describe("one line is expected");
        assert_eq!(outcome.status.code(), Some(1), "{said}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{said}");
        assert!(outcome.stderr.contains(words) && outcome.stderr.contains("disk.qcow2"), "{said}");
    }
    assert_eq!(command(&["snapshot", "list", str(&image)]).success().stdout, "");
    qemu_img(&["check", str(&image)]).success();
    save(&random_bytes(&mut random, 3 << 20)).success();
    let full = save(&random_bytes(&mut random, 100));
    assert!(full.stderr.contains("'one' already"), "{}", full.describe("the name is taken"));
}
