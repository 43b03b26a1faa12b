//! Inputs with which a server refuses to start: it prints one helpful line that names the file,
//! exits with code 1 (2 for a wrong command line), and changes nothing.

use std::fs::Permissions;
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;

use blockhouse_tests::nbd::Client;
use blockhouse_tests::{Scratch, Serve, blockhouse, nbd_uri, need, require};

#[test]
fn a_missing_image() {
    let scratch = Scratch::new();
    let path = scratch.path("missing.img");
    Serve::new(&scratch, &path).refused().failed(&["missing.img", "No such file", "create"]);
    assert!(!path.exists(), "it was made all the same");
    assert!(!scratch.socket("nbd").exists(), "the socket's file is left behind");
}

#[test]
fn a_missing_folder() {
    let scratch = Scratch::new();
    let path = scratch.path("no/such/disk.img");
    let serve = Serve::new(&scratch, &path).option("--create", "1M");
    serve.refused().failed(&["no/such/disk.img", "No such file", "there is no folder"]);
    Serve::new(&scratch, &path).refused().failed(&["no/such/disk.img", "there is no folder"]);
}

#[test]
fn a_folder() {
    let scratch = Scratch::new();
    let path = scratch.path("folder");
    std::fs::create_dir(&path).expect("a folder");
    Serve::new(&scratch, &path).refused().failed(&["folder", "give the path of a disk image"]);
    let serve = Serve::new(&scratch, &path).option("--cache", "writeback");
    serve.refused().failed(&["folder", "directory", "give the path of a disk image"]);
    let serve = Serve::new(&scratch, &path).flag("--read-only");
    serve.refused().failed(&["folder", "give the path of a disk image"]);
}

#[test]
fn a_character_device_and_a_pipe() {
    let scratch = Scratch::new();
    Serve::new(&scratch, "/dev/null".as_ref()).refused().failed(&["/dev/null", "block device"]);
    let pipe = scratch.path("pipe");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0)
        .expect("a pipe");
    // A pipe without a writer must not keep the server waiting, either.
    Serve::new(&scratch, &pipe).flag("--read-only").refused().failed(&["pipe", "block device"]);
}

#[test]
fn a_size_to_create_that_is_no_multiple_of_512_is_rounded_up() {
    let scratch = Scratch::new();
    let path = scratch.path("new.img");
    for _ in ["new", "there already"] {
        let server = Serve::new(&scratch, &path).option("--create", "1000").start();
        assert_eq!(Client::open(&server.address()).size(), 1024);
        server.stop();
    }
}

#[test]
fn an_existing_image_of_another_size_than_the_one_to_create() {
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &[5; 2048]);
    let before = image.state();
    for size in ["512", "1G"] {
        let serve = Serve::new(&scratch, image.path()).option("--create", size);
        serve.refused().failed(&["disk.img", "2048", "--create"]);
        assert_eq!(image.state(), before);
    }
}

#[test]
fn an_image_that_looks_like_qcow2() {
    let scratch = Scratch::new();
    let mut content = vec![0; 65536];
    content[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    let image = scratch.image_of("disk.img", &content);
    let before = image.state();
    let serve = || Serve::new(&scratch, image.path());
    serve().refused().failed(&["disk.img", "--format qcow2"]);
    serve().flag("--read-only").refused().failed(&["disk.img", "--format qcow2"]);
    assert_eq!(image.state(), before);
    // With `--format raw` the content does not matter: a guest may store a qcow2 image on its raw
    // disk.
    let server = serve().option("--format", "raw").start();
    let mut client = Client::open(&server.address());
    assert_eq!(client.read(0, 4), Ok(b"QFI\xfb".to_vec()));
    client.disconnect();
    server.stop();
}

#[test]
fn a_file_without_permission() {
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &[1; 512]);
    std::fs::set_permissions(image.path(), Permissions::from_mode(0o000)).expect("it is ours");
    let moved = scratch.socket("disk.img");
    let (wrapper, binary) = require!(need::nobody(scratch.short(), blockhouse()));
    std::fs::copy(image.path(), &moved).expect("root may read it");
    let serve = || {
        let serve = Serve::bare(&scratch, &moved).binary(&binary).under(&wrapper);
        serve.export("nbd://127.0.0.1:0/")
    };
    serve().refused().failed(&["disk.img", "Permission denied", "--read-only"]);
    serve().flag("--read-only").refused().failed(&["disk.img", "Permission denied"]);
    // Readable, but not writable.
    std::fs::set_permissions(&moved, Permissions::from_mode(0o444)).expect("it is ours");
    serve().refused().failed(&["disk.img", "Permission denied", "--read-only"]);
    let server = serve().flag("--read-only").start();
    assert_eq!(Client::open(&server.address()).read(0, 512), Ok(vec![1; 512]));
    server.stop();
    assert_eq!(std::fs::read(&moved).expect("root may read it"), [1; 512]);
}

#[test]
fn a_folder_for_sockets_that_is_not_there() {
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &[1; 512]);
    let serve = || Serve::bare(&scratch, image.path());
    let runtime = serve().environment("XDG_RUNTIME_DIR", "/nonexistent");
    runtime.refused().failed(&["/nonexistent/blockhouse", "No such file", "--nbd"]);
    let serve = serve().environment("XDG_RUNTIME_DIR", "");
    let temporary = serve.environment("TMPDIR", "/nonexistent");
    temporary.refused().failed(&["/nonexistent/blockhouse-", "No such file", "--nbd"]);
}

#[test]
fn a_socket_path_that_is_too_long() {
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &[1; 512]);
    let socket = scratch.socket(&"x".repeat(100));
    let uri = nbd_uri("", &socket);
    let serve = Serve::bare(&scratch, image.path()).export(&uri);
    serve.refused().failed(&["xxxx", "107", "shorter"]);
}

#[test]
fn a_socket_that_somebody_listens_on() {
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &[1; 512]);
    let _listener = UnixListener::bind(scratch.socket("nbd")).expect("the test's own socket");
    let new = scratch.path("new.img");
    let path = scratch.socket("nbd").display().to_string();
    Serve::new(&scratch, image.path()).refused().failed(&[&path, "in use", "another path"]);
    let serve = Serve::new(&scratch, &new).option("--create", "1M");
    serve.refused().failed(&[&path, "in use"]);
    assert!(!new.exists(), "the image was made all the same");
    assert!(scratch.socket("nbd").exists(), "the other one's socket is gone");
}

/// The server accepts no connection and its backlog is full: a connection to it would wait, but the
/// new server must not wait.
#[test]
fn a_socket_whose_server_hangs() {
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &[1; 512]);
    let socket = || socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None);
    let address = socket2::SockAddr::unix(scratch.socket("nbd")).expect("a short path");
    let hung = socket().expect("a socket");
    hung.bind(&address).and_then(|()| hung.listen(0)).expect("it listens");
    let waiting: Vec<_> = (0..4)
        .map(|_| {
            let client = socket().expect("a socket");
            client.set_nonblocking(true).expect("a mode");
            // A client that finds the backlog full is refused; enough of them fill it.
            let _ = client.connect(&address);
            client
        })
        .collect();
    let path = scratch.socket("nbd").display().to_string();
    Serve::new(&scratch, image.path()).refused().failed(&[&path, "in use", "another path"]);
    drop(waiting);
}

#[test]
fn a_file_in_the_place_of_the_socket() {
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &[1; 512]);
    let socket = scratch.socket("nbd");
    std::fs::write(&socket, "precious").expect("a file");
    let path = socket.display().to_string();
    Serve::new(&scratch, image.path()).refused().failed(&[&path, "no socket", "another path"]);
    assert_eq!(std::fs::read(&socket).expect("it is still there"), b"precious");
}

#[test]
fn a_socket_in_a_missing_folder() {
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &[1; 512]);
    let path = scratch.socket("no/such/socket").display().to_string();
    let serve = Serve::bare(&scratch, image.path()).export(&format!("nbd+unix:///?socket={path}"));
    serve.refused().failed(&[&path, "No such file"]);
}

#[test]
fn a_port_that_somebody_listens_on() {
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &[1; 512]);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let serve = Serve::bare(&scratch, image.path()).export(&format!("nbd://127.0.0.1:{port}/"));
    serve.refused().failed(&[&format!("127.0.0.1:{port}"), "in use", "another port"]);
}

#[test]
fn an_address_of_another_machine() {
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &[1; 512]);
    // TEST-NET-1 of RFC 5737 has no hosts.
    let serve = Serve::bare(&scratch, image.path()).export("nbd://192.0.2.1:10809/");
    serve.refused().failed(&["192.0.2.1", "address"]);
}

#[test]
fn what_the_command_line_cannot_mean() {
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &[1; 512]);
    let before = image.state();
    let serve = || Serve::new(&scratch, image.path());
    let wrong = |option: &str, value: &str, words: &[&str]| {
        serve().option(option, value).refused().wrong_usage(words);
    };
    wrong("--engine", "magic", &["magic", "io_uring", "linux-aio", "threads"]);
    wrong("--cache", "sometimes", &["sometimes", "writeback", "directsync"]);
    wrong("--discard", "perhaps", &["perhaps", "unmap", "ignore"]);
    wrong("--create", "12Q", &["12Q"]);
    wrong("--create", "-1", &["-1"]);
    wrong("--create", "99999999999999999999", &["99999999999999999999"]);
    wrong("--workers", "0", &["--workers"]);
    wrong("--format", "qed", &["qed"]);
    wrong("--nbd", "http://localhost/", &["http://localhost/", "nbd://"]);
    wrong("--nbd", "nbds://localhost/", &["nbds", "--tls-certificates", "--tls-psk"]);
    wrong("--nbd", "nbds+unix:///?socket=/tmp/x", &["TLS"]);
    wrong("--tls", "required", &["--tls-certificates"]);
    wrong("--tls-allow", "disk=me", &["--tls-certificates"]);
    wrong("--tls-allow", "disk", &["EXPORT=NAME"]);
    wrong("--nbd", "nbd+unix:///name", &["socket"]);
    wrong("--nbd", "nbd+unix:///?socket=", &["socket"]);
    serve().also(image.path()).option("--create", "1M").refused().wrong_usage(&["--create"]);
    serve().also(image.path()).option("--name", "x").refused().wrong_usage(&["name"]);
    wrong("--no-such-option", "1", &["--no-such-option"]);
    assert_eq!(image.state(), before);
    assert!(!scratch.socket("nbd").exists(), "the socket's file is left behind");
}

#[test]
fn a_full_file_system_leaves_no_image_behind() {
    let scratch = Scratch::new();
    let path = scratch.path("huge.img");
    // More than any file of ext4 or tmpfs can have.
    let serve = Serve::new(&scratch, &path).option("--create", "8000000T");
    serve.refused().failed(&["huge.img"]);
    assert!(!path.exists(), "an unfinished image is left behind");
}

#[test]
fn an_empty_image_is_served() {
    let scratch = Scratch::new();
    let image = scratch.image("empty.img", 0);
    let server = Serve::new(&scratch, image.path()).start();
    let mut client = Client::open(&server.address());
    assert_eq!(client.size(), 0);
    assert_eq!(client.flush(), 0);
    assert_ne!(client.write(0, &[1], 0), 0);
    client.disconnect();
    server.stop();
    let mut left = Vec::new();
    let mut file = std::fs::File::open(image.path()).expect("it is there");
    file.read_to_end(&mut left).expect("it can be read");
    assert_eq!(left, b"");
}
