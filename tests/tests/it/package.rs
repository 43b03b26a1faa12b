//! The units of contrib/systemd, and the Debian package, which is installed into a copy of this
//! system, used, and removed.

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::nbd::Client;
use blockhouse_tests::upgrade::{Servers, upgrade_in_the_end};
use blockhouse_tests::{
    Scratch, Serve, Trace, blockhouse, eventually,
    image_tool::{command, new_image, str},
    nbd_uri, need, require, run, run_within, tool, wait_for_exit,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

const SERVICE: &str = include_str!("../../../contrib/systemd/blockhouse@.service");
const DAEMON: &str = include_str!("../../../contrib/systemd/blockhouse.service");
const SOCKET: &str = include_str!("../../../contrib/systemd/blockhouse@.socket");
const USER: &str = include_str!("../../../contrib/systemd/blockhouse-user@.service");
/// The longest time to make a package of a debug build, on a busy machine.
const LONG: Duration = Duration::from_secs(600);
/// The highest exposure level of `systemd-analyze security`, from 0 (safe) to 10.
const MAX_EXPOSURE: f64 = 1.0;

/// The units in a folder, with the binary under test in place of the installed one.
fn units(scratch: &Scratch) -> PathBuf {
    let folder = scratch.path("units");
    std::fs::create_dir(&folder).expect("a folder");
    for (name, unit) in [("blockhouse@.service", SERVICE), ("blockhouse.service", DAEMON)] {
        let service = unit.replace("/usr/bin/blockhouse", str(blockhouse()));
        assert_ne!(service, unit);
        std::fs::write(folder.join(name), service).expect("room");
    }
    std::fs::write(folder.join("blockhouse@.socket"), SOCKET).expect("room");
    std::fs::write(folder.join("blockhouse-user@.service"), USER).expect("room");
    folder
}

#[test]
fn the_service_manager_accepts_the_units() {
    require!(need::tools(&["systemd-analyze"]));
    let scratch = Scratch::new();
    let folder = units(&scratch);
    for unit in ["blockhouse@disk.service", "blockhouse@disk.socket", "blockhouse.service"] {
        let mut verify = tool("systemd-analyze");
        verify.args(["verify", "--man=no"]).arg(folder.join(unit));
        let outcome = run(&mut verify).success();
        // The command also reports units of this system.
        let about_it = |line: &&str| line.contains("blockhouse");
        assert_eq!(outcome.stderr.lines().find(about_it), None, "{unit}");
    }
}

/// AppArmor's parser accepts the profile that the units name. `cargo xtask vm services` runs the
/// units under it.
#[test]
fn the_profile_of_the_units_is_accepted() {
    let (parser, base) = require!(need::apparmor_parser());
    let profile = concat!(env!("CARGO_MANIFEST_DIR"), "/../contrib/apparmor/blockhouse");
    let parse = |options: &[&str]| {
        let mut parse = Command::new(&parser);
        parse.args(["--skip-kernel-load", "--skip-cache", "--base"]).arg(&base);
        run(parse.args(options).arg(profile)).success().stdout
    };
    assert_eq!(parse(&["--names"]).trim(), "blockhouse");
    for unit in [SERVICE, DAEMON] {
        assert!(unit.contains("\nAppArmorProfile=-blockhouse\n"), "{unit}");
    }
    parse(&[]);
}

/// Two instances have nothing in common: no user, no folder that either may write to, and no
/// control socket.
#[test]
fn each_instance_has_walls_of_its_own() {
    for (unit, keys) in [
        (SERVICE, &["User", "Group", "RuntimeDirectory", "StateDirectory"][..]),
        (SOCKET, &["SocketUser", "SocketGroup", "ListenStream"]),
    ] {
        for key in keys {
            let values = unit.lines().filter_map(|line| line.strip_prefix(&format!("{key}=")));
            let values: Vec<_> = values.collect();
            assert!(matches!(values[..], [value] if value.contains("%i")), "{key}: {values:?}");
        }
    }
    let folders = ["StateDirectory", "RuntimeDirectory"].map(|key| (key, setting(key)));
    for (key, folder) in folders {
        let daemon = DAEMON.lines().filter_map(|line| line.strip_prefix(&format!("{key}=")));
        // The service manager changes the owner of a service's folder and of everything in it, so
        // no folder may be inside another service's.
        assert!(daemon.into_iter().all(|own| !folder.starts_with(&format!("{own}/"))), "{folder}");
    }
    assert!(!setting("ExecStart").contains("--control"), "{SERVICE}");
    assert!(SERVICE.contains("\nStateDirectoryMode=0700\n"), "{SERVICE}");
}

#[test]
fn the_service_is_hardened() {
    require!(need::tools(&["systemd-analyze"]));
    let scratch = Scratch::new();
    let folder = units(&scratch);
    for unit in ["blockhouse@.service", "blockhouse.service"] {
        let mut analyze = tool("systemd-analyze");
        analyze.args(["security", "--offline=yes", "--no-pager"]);
        let outcome = run(analyze.arg(folder.join(unit)));
        let level = outcome.stdout.lines().find(|line| line.contains("Overall exposure level"));
        let words = level.unwrap_or_else(|| panic!("{}", outcome.describe("a level")));
        let exposure = words.split_whitespace().find_map(|word| word.parse::<f64>().ok());
        assert!(exposure.is_some_and(|exposure| exposure <= MAX_EXPOSURE), "{words}");
    }
}

/// The system calls of one of systemd's groups.
fn group(name: &str) -> BTreeSet<String> {
    let outcome = run(tool("systemd-analyze").args(["syscall-filter", "--no-pager", name]));
    let lines = outcome.success().stdout;
    let lines = lines.lines().skip(1).map(str::trim);
    let names = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    names.flat_map(calls_of).collect()
}

/// The system calls that a word of a filter stands for.
fn calls_of(word: &str) -> BTreeSet<String> {
    if word.starts_with('@') { group(word) } else { [word.to_owned()].into() }
}

/// The system calls that a unit allows (`SystemCallFilter=`, systemd.exec(5)).
fn allowed(unit: &str) -> BTreeSet<String> {
    let mut allowed = group("@default");
    let filters = unit.lines().filter_map(|line| line.strip_prefix("SystemCallFilter="));
    for filter in filters {
        let words = |words: &str| words.split_whitespace().flat_map(calls_of).collect();
        match filter.strip_prefix('~') {
            Some(filter) => {
                let removed: BTreeSet<_> = words(filter);
                allowed.retain(|call| !removed.contains(call));
            }
            None => allowed.append(&mut words(filter)),
        }
    }
    allowed
}

/// A server without capabilities, as the units start it, and with its own sandbox, makes no system
/// call that the units forbid, from its start over changes and an upgrade to its end. Otherwise it
/// could not apply its sandbox.
#[test]
fn the_units_allow_what_a_server_and_its_sandbox_call() {
    require!(need::tools(&["systemd-analyze", "strace", "setpriv"]));
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let [first, second] = ["first.qcow2", "second.qcow2"].map(|name| scratch.path(name));
    for image in [&first, &second] {
        command(&["create", str(image), "4M"]).success();
    }
    let (trace, control) = (Trace::start(&scratch, "all", &[]), scratch.socket("control"));
    let serve = Serve::new(&scratch, &first).option("--control", &control).under(&trace.wrapper);
    let serve = serve.under(["setpriv", "--bounding-set=-all", "--inh-caps=-all"]);
    let server = serve.start();
    let mut requests = Control::connect(&control);
    let sandbox = requests.get("server.version", json!({}))["sandbox"].to_string();
    assert!(sandbox.contains("landlock") && sandbox.contains("seccomp"), "{sandbox}");
    requests.get("disk.open", json!({ "path": second }));
    let more = nbd_uri("", scratch.socket("more"));
    requests.get("export.add", json!({ "disk": "second.qcow2", "export": more }));
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(0, &[7; 65536], 0), 0);
    let told = upgrade_in_the_end(&control, &[]).stdout;
    let process = told.split_whitespace().nth(1).and_then(|word| word.parse().ok());
    assert_eq!((client.read(0, 4096), client.flush()), (Ok(vec![7; 4096]), 0));
    let process = process.and_then(Pid::from_raw).expect("the new server's id");
    kill_process(process, Signal::TERM).expect("it runs");
    // strace ends with the last process that it traces, and has written its log by then.
    servers.wait_for(0);
    drop(server);
    let called: BTreeSet<_> = trace.calls().into_iter().map(|call| call.name).collect();
    assert!(called.contains("io_uring_setup") && called.contains("landlock_restrict_self"));
    for unit in [SERVICE, DAEMON] {
        let allowed = allowed(unit);
        let forbidden: Vec<_> = called.iter().filter(|call| !allowed.contains(*call)).collect();
        assert!(forbidden.is_empty(), "{forbidden:?}");
    }
}

/// The value of a setting of the service.
fn setting(name: &str) -> &'static str {
    let lines = SERVICE.lines().filter_map(|line| line.split_once('='));
    lines.filter(|(key, _)| *key == name).map(|(_, value)| value).next().expect("a setting")
}

/// The arguments of the service's `ExecStart=` for an image, with this folder as /run.
fn exec_start(runtime: &str, instance: &str, image: &str) -> Vec<String> {
    let line = setting("ExecStart").replace("%t", runtime).replace("%i", instance);
    let line = line.replace("${IMAGE}", image).replace("$OPTIONS", "");
    line.split_whitespace().map(str::to_owned).collect()
}

/// A server behind a socket of systemd-socket-activate; killed when the test panics.
struct Activated(Child);

impl Activated {
    fn stop(mut self) {
        kill_process(Pid::from_child(&self.0), Signal::TERM).expect("it runs");
        let status = wait_for_exit(&mut self.0, LONG).expect("it ends");
        assert!(status.success(), "{status}");
    }
}

impl Drop for Activated {
    fn drop(&mut self) {
        // The process has ended already unless the test panics.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_command_of_the_service_serves_at_the_socket_of_the_service_manager() {
    require!(need::tools(&["systemd-socket-activate", "qemu-img"]));
    let scratch = Scratch::new();
    let image = new_image(&scratch, "disk.qcow2", "64M");
    // The effect of RuntimeDirectory=, on a tmpfs as /run is.
    let memory = Scratch::in_memory();
    let runtime = memory.path("run");
    let folder = runtime.join("blockhouse-images/disk");
    std::fs::create_dir_all(&folder).expect("a folder");
    let socket = folder.join("nbd.sock");
    let mut words = exec_start(str(&runtime), "disk", str(&image));
    words[0] = str(blockhouse()).to_owned();
    let mut activate = tool("systemd-socket-activate");
    activate.arg("--listen").arg(&socket).args(words).stderr(Stdio::null()).stdout(Stdio::null());
    let server = Activated(activate.spawn().expect("it starts"));
    assert!(eventually(LONG, || socket.exists()));
    // Until now systemd's tool listens; the first client starts the server.
    assert!(!folder.join("state").exists());
    let uri = nbd_uri("", &socket);
    let info = run_within(LONG, tool("qemu-img").args(["info", "--output=json", &uri])).success();
    assert!(info.stdout.contains("67108864"), "{}", info.stdout);
    assert!(folder.join("state").is_dir() && !folder.join("control").exists());
    server.stop();
}

/// A shell of a user who has only a user id, like that of an instance.
fn as_user(user: u32) -> Vec<String> {
    let words = format!("setpriv --reuid={user} --regid={user} --clear-groups sh -c");
    words.split(' ').map(str::to_owned).collect()
}

/// An attacker who controls an instance can do what its user can, but that user cannot access
/// folders and processes of another instance, as the units make them. Other restrictions of the
/// units, and the sandbox, are not tested here.
#[test]
fn the_user_of_one_instance_reaches_nothing_of_another() {
    const USERS: [u32; 2] = [64_992, 64_993];
    require!(need::root());
    let memory = Scratch::in_memory();
    let (_, binary) = require!(need::nobody(memory.short(), blockhouse()));
    let [images, runtime] = ["images", "run"].map(|name| memory.path(name));
    let folder = |place: &Path, name: &str, mode: &str| {
        let folder = place.join(name);
        std::fs::create_dir_all(&folder).expect("a folder");
        let mode = u32::from_str_radix(setting(mode), 8).expect("a mode");
        std::fs::set_permissions(&folder, Permissions::from_mode(mode)).expect("it is ours");
        chown(&folder, Some(USERS[0]), Some(USERS[0])).expect("root may");
        folder
    };
    let image = folder(&images, "blockhouse-images/disk", "StateDirectoryMode").join("disk");
    let run_folder = folder(&runtime, "blockhouse-images/disk", "RuntimeDirectoryMode");
    let socket = run_folder.join("nbd.sock");
    let run_as = |user, script: &str| {
        let words = as_user(user);
        run(Command::new(&words[0]).args(&words[1..]).arg(script)).status.success()
    };
    let umask = setting("UMask");
    assert!(run_as(USERS[0], &format!("umask {umask} && truncate -s 1M {}", image.display())));
    let mut words = exec_start(str(&runtime), "disk", str(&image));
    words[0] = str(&binary).to_owned();
    let export = nbd_uri("", &socket);
    let script = format!("umask {umask} && exec {} --nbd '{export}'", words.join(" "));
    let shell = as_user(USERS[0]);
    let mut server = Command::new(&shell[0]);
    server.args(&shell[1..]).arg(script).stdout(Stdio::null()).stderr(Stdio::null());
    let server = Activated(server.spawn().expect("it starts"));
    let process = server.0.id();
    let (binary, image, state) = (binary.display(), image.display(), run_folder.join("state"));
    let attempts = [
        format!("{binary} info '{export}'"),
        format!("cat {image}"),
        format!("cat < /dev/null >> {image}"),
        format!("mv {image} {image}.other && mv {image}.other {image}"),
        format!("ls {}", state.display()),
        format!("kill -0 {process}"),
        format!("ls /proc/{process}/fd/"),
    ];
    assert!(eventually(LONG, || socket.exists()));
    for attempt in attempts {
        // The attempt succeeds for the instance's own user, so it is valid.
        assert!(run_as(USERS[0], &attempt), "{attempt}");
        assert!(!run_as(USERS[1], &attempt), "{attempt}");
    }
    server.stop();
}

/// The script that runs in the copy of this system; each step is a function, so that a failure
/// names it.
const SCRIPT: &str = r#"
set -e
base=$1 deb=$2
mount -t tmpfs -o size=1G tmpfs "$base"
mkdir "$base/upper" "$base/work" "$base/root"
mount -t overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" overlay "$base/root"
cp "$deb" "$base/root/blockhouse.deb"
mount --bind /dev "$base/root/dev"
mount -t proc proc "$base/root/proc"
mount -t tmpfs -o mode=755 tmpfs "$base/root/run"
in_copy() { chroot "$base/root" "$@"; }
as_service() { in_copy setpriv --reuid="$user" --regid="$user" --clear-groups "$@"; }
as_files() { (cd "$base/upper" && find . \( -path ./var/lib/dpkg -o -path ./var/log -o -path ./var/cache -o \
    -path ./blockhouse.deb -o -name '*-' -o -name .pwd.lock \) -prune -o ! -type d -print); }
units="$base/root/usr/lib/systemd/system"
exec_start() { sed -n 's/^ExecStart=//p' "$units/$1" | sed -e 's|%t|/run|g' -e 's|%i|disk.qcow2|g' -e 's|$OPTIONS||' \
    -e "s|\${IMAGE}|$folder/disk.qcow2|"; }
user=blockhouse-disk.qcow2 folder=/var/lib/blockhouse-images/disk.qcow2

echo "step: install"
in_copy dpkg --install /blockhouse.deb
in_copy sh -c "$(exec_start blockhouse-user@.service)"
in_copy sh -c "$(exec_start blockhouse-user@.service)"
# As StateDirectory= and RuntimeDirectory= of the service.
in_copy install -d /var/lib/blockhouse-images /run/blockhouse-images
in_copy install -d -o $user -g $user -m 0700 $folder
in_copy install -d -o $user -g $user -m 0750 /run/blockhouse-images/disk.qcow2
as_service blockhouse create $folder/disk.qcow2 64M

echo "step: serve"
line=$(exec_start blockhouse@.service)
socket=/run/blockhouse-images/disk.qcow2/nbd.sock
chroot "$base/root" setpriv --reuid=$user --regid=$user --clear-groups \
    systemd-socket-activate --listen "$socket" $line &
server=$!
while [ ! -S "$base/root$socket" ]; do sleep 0.05; done
in_copy qemu-io -f raw -c 'write -P 7 0 64k' -c 'read -P 7 0 64k' "nbd+unix:///?socket=$socket"
kill $server
wait $server
# As RemoveOnStop= of the socket unit.
rm "$base/root$socket"

echo "step: remove"
in_copy dpkg --purge blockhouse
echo "left with data: $(as_files | grep -v '^./etc/' | tr '\n' ' ')"
in_copy getent passwd $user
rm -r "$base/root$folder"

echo "step: install and remove again"
in_copy dpkg --install /blockhouse.deb
in_copy dpkg --purge blockhouse
for file in $(as_files); do
    cmp -s "$base/upper/$file" "/$file" || echo "left: $file"
done
"#;

/// The source files that the package has in its documentation folder, by their paths there.
fn packed_documents(root: &Path) -> BTreeSet<PathBuf> {
    let description = std::fs::read_to_string(root.join("crates/cli/Cargo.toml")).expect("a file");
    let mut packed = BTreeSet::new();
    for line in description.lines().filter(|line| line.trim().starts_with("[\"../../")) {
        let mut words = line.split('"').skip(1).step_by(2);
        let source = words.next().and_then(|word| word.strip_prefix("../../")).expect("a path");
        let target = words.next().expect("a folder");
        let (folder, name) = source.rsplit_once('/').unwrap_or(("", source));
        let names: Vec<String> = match name.strip_prefix('*') {
            // Files that the program generates.
            _ if source.starts_with("target/") => vec![name.into()],
            Some(suffix) => std::fs::read_dir(root.join(folder))
                .expect("a folder")
                .map(|entry| entry.expect("an entry").file_name().into_string().expect("a name"))
                .filter(|name| name.ends_with(suffix))
                .collect(),
            None => vec![name.into()],
        };
        assert!(!names.is_empty(), "{source} is nothing");
        let is_there = |name: &String| root.join(folder).join(name).exists();
        assert!(source.starts_with("target/") || names.iter().all(is_there), "{source} is missing");
        if let Some(folder) = target.strip_prefix("usr/share/doc/blockhouse/") {
            packed.extend(names.iter().map(|name| Path::new(folder).join(name)));
        }
    }
    packed
}

#[test]
fn the_package_has_what_its_pages_link_to() {
    // Pages for readers who have the sources; the package need not have them.
    const SOURCES: [&str; 2] = ["ARCHITECTURE.md", "CONTRIBUTING.md"];
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    let packed = packed_documents(root);
    assert!(packed.len() > 20, "{packed:?}");
    for page in packed.iter().filter(|page| page.extension().is_some_and(|end| end == "md")) {
        // The option reference is made by the program, and links to nothing.
        let Ok(text) = std::fs::read_to_string(root.join(page)) else { continue };
        let links = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
        for link in links.filter(|link| !link.is_empty() && !link.contains("://")) {
            let mut target = page.parent().expect("a folder").to_owned();
            for part in Path::new(link).components() {
                match part {
                    std::path::Component::ParentDir => drop(target.pop()),
                    other => target.push(other),
                }
            }
            let is_there = target.as_os_str().is_empty() || packed.contains(&target);
            let is_source = SOURCES.iter().any(|name| target == Path::new(name));
            assert!(is_there || is_source, "{}: {link} is not in the package", page.display());
        }
    }
}

/// The package of the binary under test.
fn package(output: &Path) -> Result<PathBuf, String> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    let built = workspace.join("target/tools/bin/cargo-deb");
    if !built.exists() {
        need::tools(&["cargo-deb"])
            .map_err(|why| format!("{why}; cargo xtask dist installs it"))?;
    }
    let mut dist = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    dist.args(["xtask", "dist", "--deb-of"]).arg(blockhouse()).arg("--output").arg(output);
    run_within(LONG, dist.current_dir(workspace)).success();
    let list = std::fs::read_dir(output).expect("the output folder");
    let paths = list.map(|entry| entry.expect("a file").path());
    Ok(paths
        .into_iter()
        .find(|path| path.extension().is_some_and(|it| it == "deb"))
        .expect("a package"))
}

#[test]
fn the_package_is_installed_serves_and_leaves_only_data() {
    require!(need::root());
    let tools =
        ["dpkg", "unshare", "setpriv", "useradd", "systemd-socket-activate", "qemu-io", "strip"];
    require!(need::tools(&tools));
    let scratch = Scratch::new();
    let base = scratch.path("copy");
    std::fs::create_dir(&base).expect("a folder");
    let trial = "mount -t tmpfs tmpfs \"$1\" && mkdir \"$1/u\" \"$1/w\" \"$1/r\" && \
                 mount -t overlay -o \"lowerdir=/,upperdir=$1/u,workdir=$1/w\" overlay \"$1/r\"";
    let in_namespace = |script: &str| {
        let mut shell = tool("unshare");
        shell.args(["--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script, "sh"]);
        shell.arg(&base);
        shell
    };
    if !run(&mut in_namespace(trial)).status.success() {
        return need::skip("no overlay over this system can be mounted");
    }
    let deb = require!(package(&scratch.path("packages")));
    let outcome = run_within(LONG, in_namespace(SCRIPT).arg(&deb)).success();
    let left: Vec<_> = outcome.stdout.lines().filter(|line| line.starts_with("left")).collect();
    assert_eq!(
        left,
        ["left with data: ./var/lib/blockhouse-images/disk.qcow2/disk.qcow2 "],
        "{}",
        outcome.stdout
    );
}
