//! `--socket-mode` and `--socket-group`: who may connect to the guests' Unix sockets, at each
//! moment; the sockets of control and metrics have their own options, and a control socket answers
//! only the methods that its options allow.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use blockhouse_tests::control::Control;
use blockhouse_tests::{
    Scratch, Serve, Server, Trace,
    image_tool::{command, new_image, str},
    nbd_uri, need, require, run, tool,
};
use serde_json::json;

const MIB: u64 = 1 << 20;
/// A group that every Linux has, other than root's.
const GROUP: &str = "daemon";
const GROUP_ID: u32 = 1;

const NAMES: [&str; 6] = ["nbd", "vu", "control", "metrics", "more", "more.vu"];

/// A server with a socket of each kind; two are added while it runs. `private` are the options of
/// the control and metrics sockets.
fn serve(
    scratch: &Scratch,
    options: &[&str],
    private: &str,
    wrapper: &[String],
) -> (Server, Vec<PathBuf>) {
    let image = scratch.image("disk", MIB);
    let sockets: Vec<_> = NAMES.iter().map(|name| scratch.socket(name)).collect();
    let uri = |index: usize| nbd_uri("", &sockets[index]);
    let mut serve = Serve::bare(scratch, image.path()).export(&uri(0)).ready_lines(2);
    serve = serve
        .option("--vhost-user-blk", &sockets[1])
        .option("--control", format!("{}{private}", str(&sockets[2])));
    serve = serve.option("--metrics", format!("unix:{}{}", str(&sockets[3]), private));
    for option in options {
        serve = serve.flag(option);
    }
    let server = serve.under(wrapper).start();
    let mut control = Control::connect(&sockets[2]);
    for export in [uri(4), str(&sockets[5]).to_owned()] {
        control.get("export.add", json!({ "disk": "disk", "export": export }));
    }
    (server, sockets)
}

fn modes(sockets: &[PathBuf]) -> Vec<u32> {
    let mode = |path: &PathBuf| std::fs::metadata(path).expect("a socket").mode() & 0o7777;
    sockets.iter().map(mode).collect()
}

fn with_umask(umask: &str) -> Vec<String> {
    let script = format!("umask {umask}; exec \"$@\"");
    ["sh", "-c", &script, "sh"].map(str::to_owned).into()
}

#[test]
fn all_sockets_have_the_mode_that_is_asked_for() {
    let scratch = Scratch::new();
    // The umask does not change the mode.
    for umask in ["077", "000"] {
        let options = ["--socket-mode", "0660"];
        let (server, sockets) = serve(&scratch, &options, "", &with_umask(umask));
        let expected = [0o660, 0o660, 0o600, 0o600, 0o660, 0o660];
        assert_eq!(modes(&sockets), expected, "umask {umask}");
        server.stop();
        let (server, sockets) = serve(&scratch, &options, ",mode=0640", &with_umask(umask));
        let expected = [0o660, 0o660, 0o640, 0o640, 0o660, 0o660];
        assert_eq!(modes(&sockets), expected, "umask {umask}");
        server.stop();
    }
    let (server, sockets) = serve(&scratch, &[], "", &with_umask("022"));
    assert_eq!(modes(&sockets), [0o755, 0o755, 0o600, 0o600, 0o755, 0o755]);
    server.stop();
}

#[test]
fn no_socket_is_open_to_others_before_it_is_as_asked() {
    require!(need::tools(&["strace"]));
    let scratch = Scratch::new();
    let trace = Trace::start(&scratch, "fchmod,bind,fchmodat,chmod,listen", &[]);
    let (server, sockets) =
        serve(&scratch, &["--socket-mode", "0666"], ",mode=0666", &trace.wrapper);
    server.stop();
    let calls = trace.calls();
    for socket in &sockets {
        let name = format!("\"{}\"", str(socket));
        let bind =
            calls.iter().position(|call| call.name == "bind" && call.arguments.contains(&name));
        let bind = bind.expect("it was bound");
        let descriptor = calls[bind].arguments.split(',').next().expect("a descriptor");
        let before = &calls[bind - 1];
        assert_eq!(before.name, "fchmod", "{calls:?}");
        assert!(before.arguments.contains("0600"), "{before:?}");
        // Only one thread binds at a time here, so the next calls are about the same socket.
        let [changed, listens] = &calls[bind + 1..bind + 3] else { panic!("{calls:?}") };
        assert!(changed.name.ends_with("chmod") || changed.name == "fchmodat", "{changed:?}");
        assert!(changed.arguments.contains("0666"), "{changed:?}");
        assert_eq!(listens.name, "listen", "{calls:?}");
        assert_eq!(listens.arguments.split(',').next(), Some(descriptor));
    }
}

#[test]
fn members_of_the_group_connect_and_others_do_not() {
    require!(need::root());
    require!(need::tools(&["setpriv", "nbdinfo"]));
    let scratch = Scratch::new();
    let (server, sockets) = serve(&scratch, &["--socket-group", GROUP], "", &[]);
    assert_eq!(modes(&sockets), [0o660, 0o660, 0o600, 0o600, 0o660, 0o660]);
    let private = &sockets[2..4];
    assert!(
        private.iter().all(|path| std::fs::metadata(path).expect("a socket").gid() != GROUP_ID)
    );
    server.stop();
    let private = format!(",group={GROUP}");
    let (server, sockets) = serve(&scratch, &["--socket-group", GROUP], &private, &[]);
    assert_eq!(modes(&sockets), [0o660; NAMES.len()]);
    for socket in &sockets {
        assert_eq!(std::fs::metadata(socket).expect("a socket").gid(), GROUP_ID);
    }
    let ask = |group: u32| {
        let rights =
            ["--reuid=65534".to_owned(), format!("--regid={group}"), "--clear-groups".into()];
        let ask = ["nbdinfo", "--size", server.uri()];
        run(tool("setpriv").args(rights).args(ask))
    };
    assert_eq!(ask(GROUP_ID).success().stdout.trim(), MIB.to_string());
    ask(65534).failure("Permission denied");
    server.stop();
}

#[test]
fn modes_and_groups_that_make_no_sense_are_wrong_usage() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", MIB);
    for (option, value, words) in [
        ("--socket-mode", "rw", "octal mode, like 0660"),
        ("--socket-mode", "4755", "octal mode"),
        ("--socket-group", "no such group", "there is no group"),
        ("--control", "/run/c,readonly", "no option 'readonly'"),
        ("--control", "/run/c,methods=disk.lost", "no method 'disk.lost'"),
        ("--metrics", "unix:/run/m,read-only", "no option 'read-only'"),
    ] {
        let serve = Serve::new(&scratch, image.path()).option(option, value);
        serve.refused().wrong_usage(&[words]);
    }
}

#[test]
fn a_control_socket_answers_what_it_is_for() {
    let scratch = Scratch::new();
    let image = new_image(&scratch, "disk.qcow2", "1M");
    let socket = scratch.socket("control");
    for (options, answered, refused) in [
        (",read-only", &["disk.list", "stats.get"][..], &["disk.close", "snapshot.create"][..]),
        (",methods=disk.list+snapshot.*", &["disk.list"], &["job.list", "disk.close"]),
    ] {
        let control = format!("{}{options}", str(&socket));
        let server = Serve::new(&scratch, &image).option("--control", control).start();
        let mut client = Control::connect(&socket);
        let version = client.get("server.version", json!({}));
        let methods: Vec<_> = version["methods"].as_array().expect("a list").clone();
        for method in answered {
            client.get(method, json!({}));
            assert!(methods.contains(&json!(method)), "{methods:?}");
        }
        for method in refused {
            let params = json!({ "disk": "disk.qcow2", "name": "one" });
            client.refused(method, params, -32601, &["does not answer"]);
            assert!(!methods.contains(&json!(method)), "{methods:?}");
        }
        // The command uses the same socket and is restricted, too.
        let may_snapshot = options.contains("snapshot");
        let words = ["snapshot", "create", "--control", str(&socket), str(&image), "one"];
        assert_eq!(command(&words).status.success(), may_snapshot, "{options}");
        command(&["upgrade", "--control", str(&socket)]).failure("does not answer");
        command(&["ctl", str(&socket), "close", "disk.qcow2"]).failure("does not answer");
        server.stop();
    }
}
