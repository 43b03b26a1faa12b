//! Command lines of scripts that call qemu-img and qemu-nbd, run with QEMU's tools and with ours
//! under their names: exit statuses, JSON keys and images are the same, except for differences that
//! docs/from-qemu.md explains.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use blockhouse_tests::{
    Outcome, Scratch, blockhouse, eventually, image_tool::qemu_img, need, require, run, run_within,
    tool,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const SCRIPT: &str = include_str!("automation/script.txt");
const PAGE: &str = include_str!("../../../docs/from-qemu.md");
/// The longest time of a line on a busy machine.
const LONG: Duration = Duration::from_secs(120);

/// What else must be equal besides the exit status of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind<'a> {
    Plain,
    Json,
    Text,
    /// Both print the same lines on both streams.
    Lines,
    Serve,
    /// Both print these words.
    Says(&'a str),
    /// They differ; the title of the reason in docs/from-qemu.md.
    Differs(&'a str),
}

/// The lines that this version of QEMU's tools supports, without comments.
fn lines(version: u32) -> impl Iterator<Item = (Kind<'static>, &'static str)> {
    let lines = SCRIPT.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let known = lines.filter_map(move |line| match line.strip_prefix("since10 ") {
        Some(line) => (version >= 10).then_some(line),
        None => Some(line),
    });
    known.map(|line| match line.split_once(' ').expect("a command has words") {
        ("json", rest) => (Kind::Json, rest),
        ("text", rest) => (Kind::Text, rest),
        ("lines", rest) => (Kind::Lines, rest),
        ("serve", rest) => (Kind::Serve, rest),
        ("says", rest) => {
            let (words, rest) = rest[1..].split_once("' ").expect("words in quotes");
            (Kind::Says(words), rest)
        }
        ("differs", rest) => {
            let (why, rest) = rest[1..].split_once("\" ").expect("a title in quotes");
            (Kind::Differs(why), rest)
        }
        _ => (Kind::Plain, line),
    })
}

/// The first number of the version of QEMU's tools.
fn qemu_version() -> u32 {
    let told = qemu_img(&["--version"]).success().stdout;
    let version = told.split_whitespace().nth(2).and_then(|word| word.split('.').next());
    version.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{told}"))
}

/// A folder in which QEMU's tools or ours run under QEMU's names.
struct Place {
    folder: PathBuf,
    /// The first folder of the search path.
    programs: Option<PathBuf>,
}

impl Place {
    fn new(scratch: &Scratch, name: &str, programs: Option<PathBuf>) -> Self {
        let folder = scratch.path(name);
        std::fs::create_dir(&folder).expect("a folder");
        Self { folder, programs }
    }

    fn shell(&self, line: &str) -> Command {
        // With the path of the program and not its name, the process is not copied by fork.
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", line]).current_dir(&self.folder).env("XDG_RUNTIME_DIR", &self.folder);
        let before = std::env::var("PATH").unwrap_or_default();
        if let Some(programs) = &self.programs {
            shell.env("PATH", format!("{}:{before}", programs.display()));
        }
        shell
    }

    fn run(&self, line: &str) -> Outcome {
        run_within(LONG, &mut self.shell(line))
    }

    /// Starts the server of a line; returns what a client finds about its export.
    fn ask_server(&self, line: &str) -> Value {
        let server = self.shell(&format!("exec {line}")).stdout(Stdio::null()).spawn();
        let mut server = Server(server.expect("a shell"));
        let socket = self.folder.join("s");
        let listens = || std::os::unix::net::UnixStream::connect(&socket).is_ok();
        assert!(eventually(LONG, listens), "{line}: does not listen");
        let uri = format!("nbd+unix://?socket={}", socket.display());
        let info = run(tool("nbdinfo").args(["--list", "--json", &uri])).success();
        kill_process(Pid::from_child(&server.0), Signal::TERM).expect("it runs");
        blockhouse_tests::wait_for_exit(&mut server.0, LONG).expect("it ends");
        let _ = std::fs::remove_file(socket);
        let info: Value = serde_json::from_str(&info.stdout).expect("JSON");
        let export = &info["exports"][0];
        let keys = [
            "export-name",
            "export-size",
            "is_read_only",
            "can_flush",
            "can_fua",
            "can_trim",
            "can_multi_conn",
        ];
        let mut told: Value =
            keys.into_iter().map(|key| (key.to_owned(), export[key].clone())).collect();
        let contexts = export["contexts"].as_array().into_iter().flatten();
        let contexts: BTreeSet<_> = contexts.filter_map(Value::as_str).collect();
        told["contexts"] = contexts.into_iter().collect();
        told
    }

    /// The names of the files that the lines have made.
    fn names(&self) -> BTreeSet<String> {
        let entries = std::fs::read_dir(&self.folder).expect("a folder").flatten();
        let names = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
        names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }
}

/// Killed when the test panics.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Our binary under the names of QEMU's tools.
fn aliases(scratch: &Scratch) -> PathBuf {
    let folder = scratch.path("programs");
    std::fs::create_dir(&folder).expect("a folder");
    let program = std::path::absolute(blockhouse()).expect("a path");
    for name in ["qemu-img", "qemu-nbd"] {
        std::os::unix::fs::symlink(&program, folder.join(name)).expect("a link");
    }
    folder
}

/// The keys of `theirs` that `ours` lacks. Of two lists, as many elements are compared as both
/// have.
fn missing_keys(theirs: &Value, ours: &Value, path: &str) -> Vec<String> {
    match (theirs, ours) {
        (Value::Object(theirs), Value::Object(ours)) => theirs
            .iter()
            .flat_map(|(key, value)| match ours.get(key) {
                Some(found) => missing_keys(value, found, &format!("{path}.{key}")),
                // docs/from-qemu.md: `icount`.
                None if key == "icount" => Vec::new(),
                None => vec![format!("{path}.{key}")],
            })
            .collect(),
        (Value::Array(theirs), Value::Array(ours)) if !theirs.is_empty() => {
            if ours.is_empty() {
                return vec![format!("{path}[]")];
            }
            // Elements are not compared by their position: a map's extents differ if the parts of a
            // copy completed in another order.
            let path = format!("{path}[]");
            let nearest = |one| {
                let missing = ours.iter().map(|other| missing_keys(one, other, &path));
                missing.min_by_key(Vec::len).unwrap_or_default()
            };
            theirs.iter().flat_map(nearest).collect()
        }
        _ => Vec::new(),
    }
}

/// How our outcome of a line differs from theirs; `None` if it does not.
fn difference(kind: Kind<'_>, theirs: &Outcome, ours: &Outcome) -> Option<String> {
    let codes = [theirs.status.code(), ours.status.code()];
    match kind {
        Kind::Differs(why) if !PAGE.contains(&format!("**{why}")) => {
            Some(format!("docs/from-qemu.md has no '{why}'"))
        }
        Kind::Differs(_) if codes[0] == codes[1] => Some("no difference".into()),
        Kind::Differs(_) => None,
        _ if codes[0] != codes[1] => Some(format!("exit statuses {codes:?}")),
        Kind::Says(words) => {
            let lacks = |outcome: &Outcome| {
                !outcome.stdout.contains(words) && !outcome.stderr.contains(words)
            };
            (lacks(theirs) || lacks(ours)).then(|| format!("no '{words}'"))
        }
        Kind::Lines if (&theirs.stdout, &theirs.stderr) != (&ours.stdout, &ours.stderr) => {
            Some("other lines".into())
        }
        Kind::Text if theirs.stdout != ours.stdout => Some("another text".into()),
        Kind::Json => {
            let [theirs, ours] =
                [theirs, ours].map(|outcome| serde_json::from_str(&outcome.stdout));
            match (theirs, ours) {
                (Ok(theirs), Ok(ours)) => {
                    let missing = missing_keys(&theirs, &ours, "");
                    (!missing.is_empty()).then(|| format!("keys that are missing: {missing:?}"))
                }
                _ => Some("no JSON".into()),
            }
        }
        _ => None,
    }
}

/// The format of an image that QEMU's tools have made.
fn format_of(image: &Path) -> &'static str {
    match image.extension().and_then(|suffix| suffix.to_str()) {
        Some("vmdk") => return "vmdk",
        Some("vhd") => return "vpc",
        Some("vhdx") => return "vhdx",
        Some("vdi") => return "vdi",
        _ => {}
    }
    let mut first = [0; 4];
    let file = std::fs::File::open(image).expect("an image");
    let read = std::io::Read::read(&mut &file, &mut first).expect("it can be read");
    match &first[..read] {
        b"QFI\xfb" => "qcow2",
        _ => "raw",
    }
}

#[test]
fn peoples_automation_works_with_both_programs() {
    require!(need::tools(&["qemu-img", "qemu-io", "qemu-nbd", "nbdinfo", "awk", "sed"]));
    let scratch = Scratch::new();
    let theirs = Place::new(&scratch, "theirs", None);
    let ours = Place::new(&scratch, "ours", Some(aliases(&scratch)));
    let mut wrong = Vec::new();
    let mut count = 0;
    for (kind, line) in lines(qemu_version()) {
        count += 1;
        if kind == Kind::Serve {
            let [theirs, ours] = [&theirs, &ours].map(|place| place.ask_server(line));
            if theirs != ours {
                wrong.push(format!("{line}\n{theirs}\n{ours}"));
            }
            continue;
        }
        // In parallel: each has its own folder.
        let [theirs, ours] = std::thread::scope(|scope| {
            [&theirs, &ours]
                .map(|place| scope.spawn(|| place.run(line)))
                .map(|run| run.join().expect("it runs"))
        });
        if let Some(what) = difference(kind, &theirs, &ours) {
            wrong.push(format!(
                "{line}: {what}\n{}\n{}",
                theirs.describe("QEMU"),
                ours.describe("here")
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    assert!(count > 450, "{count} lines");
    assert_eq!(ours.names(), theirs.names());
    for name in ours.names() {
        let [theirs, ours] = [&theirs, &ours].map(|place| place.folder.join(&name));
        let format = format_of(&theirs);
        let [theirs, ours] = [&theirs, &ours].map(|path| path.to_str().expect("a plain name"));
        let compared = qemu_img(&["compare", "-f", format, "-F", format, theirs, ours]).success();
        assert!(!compared.stdout.contains("mismatch"), "{}", compared.describe(&name));
    }
}
