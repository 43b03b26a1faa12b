//! The program under the name qemu-storage-daemon: QEMU's command line, compared with QEMU's own
//! program.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use blockhouse_tests::guest::{Guest, LONG, OUT};
use blockhouse_tests::image_tool::{qemu_img, qemu_io, str};
use blockhouse_tests::nbd::Client;
use blockhouse_tests::pki::{Pki, Validity};
use blockhouse_tests::qmp::Qmp;
use blockhouse_tests::{
    Scratch, blockhouse, copy_blockhouse, eventually, nbd_uri, need, require, run, tool,
};
use blockhouse_vhost_user::driver::Options;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const EPERM: u32 = 1;
const READ_ONLY_FLAG: u16 = 2;
pub(crate) const NAME: &str = "qemu-storage-daemon";

fn wait_until(what: &str, condition: impl FnMut() -> bool) {
    assert!(eventually(Duration::from_secs(30), condition), "{what}");
}

/// The program under test, under QEMU's name.
pub(crate) fn ours(scratch: &Scratch) -> Command {
    called(scratch, NAME)
}

/// The program under test, under this name.
pub(crate) fn called(scratch: &Scratch, name: &str) -> Command {
    let folder = scratch.path("bin");
    let program = folder.join(name);
    if !program.exists() {
        std::fs::create_dir_all(&folder).expect("a folder");
        std::os::unix::fs::symlink(blockhouse(), &program).expect("a link");
    }
    Command::new(program)
}

/// A daemon; killed on drop.
pub(crate) struct Daemon(Child);

impl Daemon {
    /// Starts a daemon, and waits until it has executed its command line.
    pub(crate) fn start(mut command: Command, words: &[String], pid: &Path) -> Self {
        command.args(words).arg("--pidfile").arg(pid).stdin(Stdio::null());
        let daemon = Self(command.spawn().expect("it is there"));
        wait_until("it is ready", || pid.exists());
        daemon
    }

    pub(crate) fn stop(mut self) {
        let id = Pid::from_child(&self.0);
        kill_process(id, Signal::TERM).expect("it runs");
        assert!(self.0.wait().expect("a child").success());
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The arguments of a command line, with DIR replaced by a folder.
pub(crate) fn words(line: &[&str], folder: &Path) -> Vec<String> {
    line.iter().map(|word| word.replace("DIR", str(folder))).collect()
}

/// A folder with the images `d` (qcow2) and `r` (raw).
pub(crate) fn folder(scratch: &Scratch, name: &str) -> PathBuf {
    let folder = scratch.path(name);
    std::fs::create_dir(&folder).expect("a folder");
    qemu_img(&["create", "-q", "-f", "qcow2", str(&folder.join("d")), "1M"]).success();
    std::fs::write(folder.join("r"), vec![0; MIB as usize]).expect("room");
    folder
}

/// The exit status and the error line of a program that ends by itself.
fn told(mut command: Command, words: &[String]) -> (Option<i32>, String) {
    let output = command.args(words).stdin(Stdio::null()).output().expect("it is there");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    // Only the line with the error.
    let line = said.lines().last().unwrap_or_default().to_owned();
    (output.status.code(), line)
}

#[test]
fn a_daemon_in_the_background_is_one_process_whatever_its_option_is_called() {
    let scratch = Scratch::new();
    let pid = scratch.path("pid");
    let copy = scratch.path(NAME);
    copy_blockhouse(&copy);
    let link = ours(&scratch).get_program().to_owned();
    let lines =
        [&["--daemonize", "--pidfile", "/none"][..], &["--daemonize", "--daemonize"], &["--d"]];
    for program in [copy.into_os_string(), link] {
        for line in lines {
            let mut command = Command::new(&program);
            let outcome = run(command.args(line).arg("--pidfile").arg(&pid));
            outcome.success();
            let text = std::fs::read_to_string(&pid).expect("it is ready");
            let id = text.trim().parse().ok().and_then(Pid::from_raw).expect("a process");
            kill_process(id, Signal::TERM).expect("it runs");
            wait_until("it has ended", || !pid.exists());
        }
    }
}

#[test]
fn wrong_options_are_refused_with_the_words_of_qemu() {
    require!(need::tools(&[NAME, "qemu-img"]));
    let scratch = Scratch::new();
    let folder = folder(&scratch, "images");
    let disk = "driver=file,node-name=f,filename=DIR/r";
    for line in [
        &["--blockdev", "driver=zz,node-name=x"][..],
        &["--blockdev", "file,node-name=f,filename=DIR/none"],
        &["--blockdev", "file,filename=DIR/r"],
        &["--blockdev", disk, "--blockdev", disk],
        &["--blockdev", "driver=file,node-name=f,filename=DIR/r,read-only=maybe"],
        &["--blockdev", "driver=qcow2,node-name=q,file=zz"],
        &["--blockdev", disk, "--export", "nbd,id=e,node-name=f"],
        &["--blockdev", disk, "--export", "nbd,node-name=f"],
        &["--blockdev", disk, "--export", "zz,id=e,node-name=f"],
        &["--export", "vhost-user-blk,id=e,node-name=f,addr.type=unix,addr.path=DIR/s"],
        &["--nbd-server", "addr.type=unix"],
        &[
            "--nbd-server",
            "addr.type=unix,addr.path=DIR/s",
            "--nbd-server",
            "addr.type=unix,addr.path=DIR/s",
        ],
        &["--nbd-server", "addr.type=unix,addr.path=DIR/s", "--export", "nbd,id=e,node-name=zz"],
        &["--nbd-server", "addr.type=fd,addr.str=1"],
        &["--nbd-server", "addr.type=fd,addr.str=99"],
        &["--nbd-server", "addr.type=fd,addr.str=x"],
        &["--chardev", "socket,id=c,fd=x,server=on"],
        &["--chardev", "socket,id=c,fd=3,path=DIR/s,server=on"],
        &["--object", "zz,id=x"],
        &["--object", "iothread"],
        &["--object", "iothread,id=i", "--object", "iothread,id=i"],
        &["--blockdev", "throttle,node-name=t,throttle-group=g,file=f"],
        &["--blockdev", "a.b=1,a=2"],
        &["--monitor", "c"],
    ] {
        let words = words(line, &folder);
        let [own, theirs] = [ours(&scratch), tool(NAME)].map(|program| told(program, &words));
        assert_eq!(own, theirs, "{line:?}");
        assert_eq!(own.0, Some(1));
    }
    // Options that we do not support have our own errors.
    for (line, said) in [
        (&["--chardev", "pty,id=c"][..], "'pty' are not possible"),
        (
            &["--blockdev", disk, "--export", "fuse,id=e,node-name=f,mountpoint=/m"],
            "'fuse' are not possible",
        ),
        (&["--blockdev", "ssh,node-name=n"], "Driver 'ssh' is not possible here"),
        (&["--blockdev", "null-co,node-name=n,size=-1"], "'size' does not accept value '-1'"),
        (&["--blockdev", "null-co,node-name=n,size=x"], "type for 'size', expected: integer"),
        (&["--chardev", "stdio,id=c", "--monitor", "c", "--daemonize"], "--daemonize"),
    ] {
        let (status, line) = told(ours(&scratch), &words(line, &folder));
        assert_eq!(status, Some(1));
        assert!(line.contains(said), "{line}");
    }
}

/// As LXD serves a snapshot: the disk is a device, and the bitmaps are those of a qcow2 image with
/// the device as its data file, in place of the missing file that the image names.
#[test]
fn bitmaps_of_another_read_only_node_are_offered() {
    require!(need::tools(&["qemu-img", "qemu-io", NAME, "nbdinfo"]));
    let scratch = Scratch::new();
    let folder = folder(&scratch, "images");
    let [gone, disk, image] = ["gone", "disk", "image"].map(|name| folder.join(name));
    let options = format!("data_file={},data_file_raw=on", str(&gone));
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", &options, str(&image), "1M"]).success();
    qemu_img(&["bitmap", "--add", "-g", "64k", str(&image), "since"]).success();
    qemu_io("qcow2", &image, &["write -P 5 128k 64k"]);
    std::fs::rename(&gone, &disk).expect("a file");
    let mut maps = Vec::new();
    for command in [ours(&scratch), tool(NAME)] {
        let (socket, pid) = (scratch.socket("nbd"), scratch.path("pid"));
        let line = [
            "--nbd-server",
            &format!("addr.type=unix,addr.path={}", str(&socket)),
            "--blockdev",
            r#"{"driver":"file","node-name":"data-file","filename":"DIR/disk","read-only":true}"#,
            "--blockdev",
            r#"{"driver":"raw","node-name":"data","file":"data-file","read-only":true}"#,
            "--blockdev",
            r#"{"driver":"file","node-name":"meta-file","filename":"DIR/image","read-only":true}"#,
            "--blockdev",
            r#"{"driver":"qcow2","node-name":"meta","file":"meta-file","data-file":"data","read-only":true}"#,
            "--export",
            r#"{"type":"nbd","id":"e","node-name":"data","name":"root","bitmaps":[{"node":"meta","name":"since"}]}"#,
        ];
        let daemon = Daemon::start(command, &words(&line, &folder), &pid);
        let uri = format!("nbd+unix:///root?socket={}", str(&socket));
        let map = ["--map=qemu:dirty-bitmap:since", "--json", &uri];
        maps.push(run(tool("nbdinfo").args(map)).success().stdout);
        daemon.stop();
    }
    assert_eq!(maps[0], maps[1]);
    assert!(maps[0].contains("131072"), "{}", maps[0]);
    // A writable node, and a node of a format, are refused as data files.
    for (node, said) in [
        ("data", r#"{"driver":"file","node-name":"data","filename":"DIR/disk"}"#),
        (
            "data",
            r#"{"driver":"qcow2","node-name":"data","file":{"driver":"file","filename":"DIR/d"},"read-only":true}"#,
        ),
    ] {
        let meta = format!(
            r#"{{"driver":"qcow2","node-name":"meta","file":{{"driver":"file","filename":"DIR/image"}},"data-file":"{node}","read-only":true}}"#
        );
        let (status, line) =
            told(ours(&scratch), &words(&["--blockdev", said, "--blockdev", &meta], &folder));
        assert!(status == Some(1) && line.contains("data file of"), "{line}");
    }
}

#[test]
fn an_image_is_served_in_the_background_until_a_signal() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let folder = folder(&scratch, "images");
    let vu = scratch.socket("vu");
    let (nbd, pid) = (scratch.socket("nbd"), scratch.path("pid"));
    let vu_export =
        format!("type=vhost-user-blk,id=v,node-name=r,addr.type=unix,addr.path={}", str(&vu));
    let line = [
        "--object",
        "iothread,id=io",
        "--object",
        "iothread,id=io2",
        "--blockdev",
        r#"{"driver":"qcow2","node-name":"d","file":{"driver":"file","filename":"DIR/d"}}"#,
        "--blockdev",
        "driver=raw,node-name=r,file.driver=file,file.filename=DIR/r,read-only=off",
        "--nbd-server",
        &format!("addr.type=unix,addr.path={}", str(&nbd)),
        "--export",
        "type=nbd,id=e,node-name=d,name=x,iothread=io",
        "--export",
        "nbd,id=w,node-name=d,writable=on",
        "--export",
        &vu_export,
        "--pidfile",
        str(&pid),
        "--daem",
    ];
    let output = ours(&scratch).args(words(&line, &folder)).output().expect("it is there");
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
    let id: i32 =
        std::fs::read_to_string(&pid).expect("it is written").trim().parse().expect("a number");
    let connect = |name: &str| Client::at(&nbd, name);
    let (mut reader, mut writer) = (connect("x"), connect("d"));
    assert_eq!(
        [reader.flags(), writer.flags()].map(|flags| flags & READ_ONLY_FLAG),
        [READ_ONLY_FLAG, 0]
    );
    assert_eq!(writer.write(0, &[7; 512], 0), 0);
    assert_eq!(reader.read(0, 512), Ok(vec![7; 512]));
    assert_eq!(reader.write(0, &[8; 512], 0), EPERM);
    let mut guest = Guest::connect(&vu, Options::default());
    guest.post(0, 0, OUT, 0);
    assert_eq!(guest.outcome(0, LONG), Some((0, 1)), "VIRTIO_BLK_S_IOERR");
    drop((reader, writer, guest));
    kill_process(Pid::from_raw(id).expect("a number"), Signal::TERM).expect("it runs");
    wait_until("it ends", || !pid.exists() && !nbd.exists() && !vu.exists());
    qemu_io("qcow2", &folder.join("d"), &["read -P 7 0 512"]);
}

/// The answers of a program to lines at its standard input.
pub(crate) fn at_stdio(mut command: Command, words: &[String], lines: &[&str]) -> Vec<Value> {
    command.args(["--chardev", "stdio,id=c", "--monitor", "chardev=c"]).args(words);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it is there");
    let mut input = child.stdin.take().expect("a pipe");
    lines.iter().for_each(|line| writeln!(input, "{line}").expect("it reads"));
    let output = child.wait_with_output().expect("a child");
    assert!(output.status.success());
    drop(input);
    let text = String::from_utf8(output.stdout).expect("text");
    let answers = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    // Removes values of versions and times.
    answers
        .filter(|answer| answer["QMP"].is_null())
        .map(|mut answer| {
            answer.as_object_mut().expect("an object").remove("timestamp");
            answer
        })
        .collect()
}

#[test]
fn a_monitor_at_standard_input_answers_as_qemus() {
    require!(need::tools(&[NAME, "qemu-img"]));
    let scratch = Scratch::new();
    let folder = folder(&scratch, "images");
    let line = words(
        &[
            "--object",
            "throttle-group,id=g,x-iops-total=1000,x-iops-total-max=1000",
            "--blockdev",
            "file,node-name=f,filename=DIR/d",
            "--blockdev",
            "qcow2,node-name=q,file=f",
            "--blockdev",
            "throttle,node-name=t,throttle-group=g,file=q",
            "--nbd-server",
            "addr.type=inet,addr.host=127.0.0.1,addr.port=0",
            "--export",
            "nbd,id=e,node-name=t,writable=on",
        ],
        &folder,
    );
    let lines = [
        "{'execute':'qmp_capabilities'}",
        "{'execute':'query-block-exports'}",
        "{'execute':'blockdev-del','arguments':{'node-name':'zz'}}",
        "{'execute':'object-del','arguments':{'id':'g'}}",
        "{'execute':'object-del','arguments':{'id':'zz'}}",
        "{'execute':'object-add','arguments':{'qom-type':'iothread','id':'g'}}",
        "{'execute':'object-add','arguments':{'qom-type':'iothread','id':'i'}}",
        "{'execute':'object-add','arguments':{'qom-type':'zz','id':'j'}}",
        "{'execute':'object-add','arguments':{'id':'j'}}",
        "{'execute':'object-add','arguments':{'qom-type':'secret','id':'j'}}",
        "{'execute':'object-add','arguments':{'qom-type':'throttle-group','id':'h','limits':{'bps-read':10,'bps-read-max':5}}}",
        "{'execute':'block-export-del','arguments':{'id':'e'}}",
        "{'execute':'blockdev-del','arguments':{'node-name':'t'}}",
        "{'execute':'object-del','arguments':{'id':'g'}}",
        "{'execute':'nbd-server-stop'}",
        "{'execute':'quit'}",
    ];
    let [own, theirs] =
        [ours(&scratch), tool(NAME)].map(|program| at_stdio(program, &line, &lines));
    assert_eq!(own, theirs);
}

#[test]
fn a_monitor_may_be_a_socket_that_a_client_listens_at() {
    let scratch = Scratch::new();
    let (socket, listening, pid) = (scratch.socket("c"), scratch.socket("s"), scratch.path("pid"));
    std::fs::write(scratch.path("r"), vec![0; MIB as usize]).expect("room");
    let listener = UnixListener::bind(&socket).expect("a socket");
    let line = [
        "--chardev",
        &format!("socket,id=c,path={}", str(&socket)),
        "--chardev",
        &format!("socket,id=s,path={},server=on,wait=off", str(&listening)),
        "--monitor",
        "c",
        "--monitor",
        "chardev=s,mode=control",
    ];
    let mut daemon = Daemon::start(ours(&scratch), &words(&line, Path::new("")), &pid);
    let (client, _) = listener.accept().expect("it connects");
    let mut client = Qmp::over(client);
    // The other monitor has the same nodes, and gets the events, too.
    let mut other = Qmp::connect(&listening);
    let node = json!({ "driver": "file", "node-name": "f", "filename": scratch.path("r") });
    client.get("blockdev-add", node);
    let taken = json!({ "driver": "file", "node-name": "f", "filename": scratch.path("r") });
    assert!(other.refused("blockdev-add", taken).contains("Duplicate nodes"));
    other.get("quit", json!({}));
    assert!(daemon.0.wait().expect("a child").success());
    assert!(!pid.exists() && !listening.exists());
}

#[test]
fn a_launcher_passes_listening_sockets_and_connections_by_number() {
    require!(need::tools(&[NAME]));
    let scratch = Scratch::new();
    std::fs::write(scratch.path("r"), vec![0; MIB as usize]).expect("room");
    let line = [
        "--blockdev",
        "file,node-name=f,filename=DIR/r",
        "--nbd-server",
        "addr.type=fd,addr.str=3",
        "--export",
        "nbd,id=e,node-name=f",
        "--chardev",
        "socket,id=s,fd=4,server=on,wait=off",
        "--chardev",
        "socket,id=c,fd=5",
        "--monitor",
        "s",
        "--monitor",
        "c",
    ];
    let line = words(&line, &scratch.path(""));
    for (name, program) in [("own", ours(&scratch)), ("theirs", tool(NAME))] {
        let [nbd, qmp] = ["nbd", "qmp"].map(|what| scratch.socket(&format!("{name}-{what}")));
        let listen = |path| OwnedFd::from(UnixListener::bind(path).expect("a socket"));
        let (near, far) = UnixStream::pair().expect("a socket");
        let script = "exec \"$@\" 3>&1 4>&2 5<&0 0</dev/null >/dev/null 2>&1";
        let mut launcher = Command::new("sh");
        launcher.args(["-c", script, "sh"]).arg(program.get_program()).args(&line);
        launcher.stdin(OwnedFd::from(far)).stdout(listen(&nbd)).stderr(listen(&qmp));
        let mut daemon = Daemon(launcher.spawn().expect("it is there"));
        // The daemon alone has the sockets now.
        drop(launcher);
        let mut monitor = Qmp::over(near);
        assert_eq!(Client::at(&nbd, "f").read(0, 512), Ok(vec![0; 512]));
        monitor.get("nbd-server-stop", json!({}));
        wait_until("its socket is closed", || UnixStream::connect(&nbd).is_err());
        let addr = json!({ "type": "fd", "data": { "str": "3" } });
        let why = monitor.refused("nbd-server-start", json!({ "addr": addr }));
        assert!(why.contains("only QEMU supports"), "{why}");
        Qmp::connect(&qmp).get("quit", json!({}));
        assert!(daemon.0.wait().expect("a child").success());
    }
}

#[test]
fn images_name_others_and_have_keys_by_objects() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let folder = folder(&scratch, "images");
    let (base, key) = (scratch.path("elsewhere"), folder.join("key"));
    std::fs::create_dir(&base).expect("a folder");
    let base = base.join("base");
    qemu_img(&["create", "-q", "-f", "qcow2", str(&base), "1M"]).success();
    qemu_io("qcow2", &base, &["write -P 5 0 512"]);
    let over = folder.join("over");
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", str(&base), str(&over)])
        .success();
    std::fs::copy(&over, folder.join("alone")).expect("room");
    std::fs::write(&key, "secret").expect("room");
    let object = format!("secret,id=k,file={}", str(&key));
    let encrypted = folder.join("luks");
    let options = "key-secret=k,iter-time=10";
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "luks",
        "--object",
        &object,
        "-o",
        options,
        str(&encrypted),
        "1M",
    ])
    .success();
    let nbd = scratch.socket("nbd");
    let line = [
        "--object",
        "secret,id=k,data=secret",
        "--blockdev",
        "qcow2,node-name=o,file.driver=file,file.filename=DIR/over",
        "--blockdev",
        "luks,node-name=l,key-secret=k,file.driver=file,file.filename=DIR/luks",
        "--blockdev",
        r#"{"driver":"qcow2","node-name":"alone","backing":null,"file":{"driver":"file","filename":"DIR/alone"}}"#,
        "--nbd-server",
        &format!("addr.type=unix,addr.path={}", str(&nbd)),
        "--export",
        "nbd,id=a,node-name=alone",
        "--export",
        "nbd,id=o,node-name=o",
        "--export",
        "nbd,id=l,node-name=l",
    ];
    let daemon = Daemon::start(ours(&scratch), &words(&line, &folder), &scratch.path("pid"));
    let connect = |name: &str| Client::at(&nbd, name);
    assert_eq!(connect("o").read(0, 512), Ok(vec![5; 512]));
    assert_eq!(connect("alone").read(0, 512), Ok(vec![0; 512]));
    assert_eq!(connect("l").size(), MIB);
    // A node that is an export of another server.
    let more = scratch.socket("more");
    let line = [
        "--blockdev",
        &format!(
            "nbd,node-name=n,read-only=on,server.type=unix,server.path={},export=o",
            str(&nbd)
        ),
        "--blockdev",
        "raw,node-name=r,read-only=on,file=n",
        "--nbd-server",
        &format!("addr.type=unix,addr.path={}", str(&more)),
        "--export",
        "nbd,id=r,node-name=r",
    ];
    let second = Daemon::start(ours(&scratch), &words(&line, &folder), &scratch.path("pid2"));
    let mut client = Client::at(&more, "r");
    assert_eq!(client.read(0, 512), Ok(vec![5; 512]));
    client.disconnect();
    second.stop();
    daemon.stop();
}

#[test]
fn clients_of_the_nbd_server_need_the_tls_of_its_object() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let folder = folder(&scratch, "images");
    std::fs::write(folder.join("keys.psk"), format!("u:{}\n", "5a".repeat(32))).expect("room");
    let nbd = scratch.socket("nbd");
    let line = [
        "--object",
        "tls-creds-psk,id=t,dir=DIR,endpoint=server",
        "--blockdev",
        "file,node-name=r,filename=DIR/r",
        "--nbd-server",
        &format!("addr.type=unix,addr.path={},tls-creds=t", str(&nbd)),
        "--export",
        "nbd,id=e,node-name=r",
    ];
    let daemon = Daemon::start(ours(&scratch), &words(&line, &folder), &scratch.path("pid"));
    let image = format!("driver=nbd,path={},export=r", str(&nbd));
    qemu_img(&["info", "--image-opts", &image]).failure("TLS");
    let object = format!("tls-creds-psk,id=t,dir={},endpoint=client,username=u", str(&folder));
    let image = format!("{image},tls-creds=t");
    qemu_img(&["info", "--object", &object, "--image-opts", &image]).success();
    daemon.stop();
}

/// The arguments of a server with TLS by this object, and the path of its socket.
fn with_tls(scratch: &Scratch, object: &str) -> (Vec<String>, PathBuf) {
    let nbd = scratch.socket(object.split(',').next().expect("a kind"));
    let line = [
        "--object",
        &format!("{object},id=t,endpoint=server"),
        "--blockdev",
        "file,node-name=r,filename=DIR/r,read-only=on",
        "--nbd-server",
        &format!("addr.type=unix,addr.path={},tls-creds=t", str(&nbd)),
        "--export",
        "nbd,id=e,node-name=r",
    ];
    (words(&line, &scratch.path("images")), nbd)
}

#[test]
fn exports_of_other_servers_are_nodes_with_the_tls_of_client_objects() {
    require!(need::tools(&[NAME, "qemu-img", "certtool"]));
    let scratch = Scratch::new();
    let folder = folder(&scratch, "images");
    std::fs::write(folder.join("r"), vec![7; MIB as usize]).expect("room");
    std::fs::write(folder.join("keys.psk"), format!("u:{}\n", "5a".repeat(32))).expect("room");
    let pki = Pki::new(&scratch.path("pki"));
    pki.server();
    let client = pki.client("alice", Validity::Now);
    let (psk, by_key) = with_tls(&scratch, &format!("tls-creds-psk,dir={}", str(&folder)));
    let (x509, certified) =
        with_tls(&scratch, &format!("tls-creds-x509,dir={}", str(pki.folder())));
    let _servers = [
        Daemon::start(ours(&scratch), &psk, &scratch.path("pid1")),
        Daemon::start(tool(NAME), &x509, &scratch.path("pid2")),
    ];
    let remote = format!("nbd,node-name=n,server.type=unix,server.path={},export=r", str(&by_key));
    let (qmp, nbd) = (scratch.socket("qmp"), scratch.socket("nbd"));
    let line = [
        "--object",
        "tls-creds-psk,id=t,dir=DIR,endpoint=client,username=u",
        "--blockdev",
        &format!("{remote},read-only=on,tls-creds=t"),
        "--nbd-server",
        &format!("addr.type=unix,addr.path={}", str(&nbd)),
        "--export",
        "nbd,id=n,node-name=n",
        "--chardev",
        &format!("socket,id=c,path={},server=on,wait=off", str(&qmp)),
        "--monitor",
        "c",
    ];
    let daemon = Daemon::start(ours(&scratch), &words(&line, &folder), &scratch.path("pid"));
    assert_eq!(Client::at(&nbd, "n").read(0, 512), Ok(vec![7; 512]));
    let mut qmp = Qmp::connect(&qmp);
    // An object that a node uses can be deleted, as in QEMU.
    qmp.get("object-del", json!({ "id": "t" }));
    assert_eq!(Client::at(&nbd, "n").read(0, 512), Ok(vec![7; 512]));
    qmp.get("object-add", json!({ "qom-type": "tls-creds-x509", "id": "x", "dir": client }));
    let node = |more: Value| {
        let mut node = json!({
            "driver": "nbd",
            "node-name": "x",
            "server": { "type": "unix", "path": certified },
            "export": "r",
            "read-only": true,
            "tls-creds": "x",
        });
        more.as_object().expect("members").iter().for_each(|(key, of)| node[key] = of.clone());
        node
    };
    let other = qmp.refused("blockdev-add", node(json!({ "tls-hostname": "other.example" })));
    assert!(other.contains("hostname mismatch"), "{other}");
    qmp.get("blockdev-add", node(json!({ "tls-hostname": "localhost" })));
    qmp.get("block-export-add", json!({ "type": "nbd", "id": "x", "node-name": "x" }));
    assert_eq!(Client::at(&nbd, "x").read(0, 512), Ok(vec![7; 512]));
    daemon.stop();
    for line in [
        &["--object", "tls-creds-psk,id=t"][..],
        &["--blockdev", &format!("{remote},tls-creds=none")],
        &["--object", "iothread,id=i", "--blockdev", &format!("{remote},tls-creds=i")],
        &[
            "--object",
            "tls-creds-psk,id=t,dir=DIR,endpoint=server",
            "--blockdev",
            &format!("{remote},tls-creds=t"),
        ],
        &[
            "--object",
            "tls-creds-psk,id=t,dir=DIR,username=u",
            "--nbd-server",
            "addr.type=unix,addr.path=DIR/s,tls-creds=t",
        ],
    ] {
        let words = words(line, &folder);
        let [own, theirs] = [ours(&scratch), tool(NAME)].map(|program| told(program, &words));
        assert_eq!(own, theirs, "{line:?}");
        assert_eq!(own.0, Some(1));
    }
}

/// Whether the server greets a client before `time` is over. The client stays connected.
fn is_greeted(client: &mut UnixStream, time: Duration) -> bool {
    client.set_read_timeout(Some(time)).expect("a socket");
    let mut magic = [0; 8];
    client.read_exact(&mut magic).is_ok() && magic == *b"NBDMAGIC"
}

#[test]
fn the_nbd_server_has_as_many_clients_as_it_is_told() {
    let scratch = Scratch::new();
    let folder = folder(&scratch, "images");
    let nbd = scratch.socket("nbd");
    let line = [
        "--blockdev",
        "file,node-name=r,filename=DIR/r",
        "--nbd-server",
        &format!("addr.type=unix,addr.path={},max-connections=1", str(&nbd)),
        "--export",
        "nbd,id=e,node-name=r",
    ];
    let daemon = Daemon::start(ours(&scratch), &words(&line, &folder), &scratch.path("pid"));
    let mut first = UnixStream::connect(&nbd).expect("it listens");
    assert!(is_greeted(&mut first, LONG));
    let mut second = UnixStream::connect(&nbd).expect("it listens");
    assert!(!is_greeted(&mut second, Duration::from_millis(300)));
    drop(first);
    assert!(is_greeted(&mut second, LONG));
    daemon.stop();
}

#[test]
fn clients_are_told_the_depth_of_allocation_where_the_export_says_so() {
    require!(need::tools(&["nbdinfo"]));
    let scratch = Scratch::new();
    let folder = folder(&scratch, "images");
    let nbd = scratch.socket("nbd");
    let line = [
        "--blockdev",
        "file,node-name=r,filename=DIR/r",
        "--nbd-server",
        &format!("addr.type=unix,addr.path={}", str(&nbd)),
        "--export",
        "nbd,id=e,node-name=r",
        "--export",
        "nbd,id=d,node-name=r,name=deep,allocation-depth=on",
    ];
    let daemon = Daemon::start(ours(&scratch), &words(&line, &folder), &scratch.path("pid"));
    for (name, contexts) in
        [("r", &["base:allocation"][..]), ("deep", &["base:allocation", "qemu:allocation-depth"])]
    {
        let uri = nbd_uri(name, &nbd);
        let told = run(tool("nbdinfo").args(["--json", &uri])).success().stdout;
        let told: Value = serde_json::from_str(&told).expect("JSON");
        assert_eq!(told["exports"][0]["contexts"], json!(contexts), "{name}");
    }
    daemon.stop();
}

/// The descriptions of an export: in the reply to LIST, and in the reply to GO.
pub(crate) fn descriptions(socket: &Path, name: &str) -> [Value; 2] {
    let uri = nbd_uri(name, socket);
    [&["--list", "--json"][..], &["--json"]].map(|options| {
        let told = run(tool("nbdinfo").args(options).arg(&uri)).success().stdout;
        let told: Value = serde_json::from_str(&told).expect("JSON");
        let mut exports = told["exports"].as_array().expect("a list").iter();
        let export = exports.find(|export| export["export-name"] == name).expect("it is listed");
        export["description"].clone()
    })
}

#[test]
fn clients_are_told_the_description_of_an_export() {
    const TEXT: &str = "the guest's \"web\" disk, ü";
    require!(need::tools(&["nbdinfo"]));
    let scratch = Scratch::new();
    let nbd = scratch.socket("nbd");
    let image = scratch.image("web", MIB);
    let serve = |text: &str| {
        let mut server = called(&scratch, "qemu-nbd");
        server.args(["-t", "-f", "raw", "-x", "web", "-D", text, "-k", str(&nbd)]);
        server.arg(image.path());
        server
    };
    let long = "x".repeat(4097);
    run(&mut serve(&long)).failure(&format!("qemu-nbd: export description '{long}' too long\n"));
    let server = Daemon(serve(TEXT).spawn().expect("it is there"));
    wait_until("it listens", || UnixStream::connect(&nbd).is_ok());
    assert_eq!(descriptions(&nbd, "web"), [TEXT, TEXT]);
    server.stop();

    let folder = folder(&scratch, "images");
    let socket = scratch.socket("daemon");
    let line = |text: &str| {
        let (server, of_text) = (
            format!("addr.type=unix,addr.path={}", str(&socket)),
            format!("nbd,id=t,node-name=r,name=text,description={}", text.replace(',', ",,")),
        );
        let node = "file,node-name=r,filename=DIR/r";
        let plain = "nbd,id=p,node-name=r,name=plain";
        let line =
            ["--blockdev", node, "--nbd-server", &server, "--export", plain, "--export", &of_text];
        words(&line, &folder)
    };
    let (code, error) = told(ours(&scratch), &line(&long));
    assert_eq!(code, Some(1));
    assert!(error.ends_with(&format!("description '{long}' too long")), "{error}");
    let daemon = Daemon::start(ours(&scratch), &line(TEXT), &scratch.path("pid"));
    assert_eq!(descriptions(&socket, "text"), [TEXT, TEXT]);
    assert_eq!(descriptions(&socket, "plain"), [Value::Null, Value::Null]);
    daemon.stop();
}
