//! The open files of a process, by `/proc`: which devices it serves, and whether it serves anything
//! else.
//!
//! Guarantee: a file is treated as open only if `/proc` shows it. So a process is ended for a
//! device only if `/proc` shows that the process has the device open.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::Pid;

/// The prefix of the path of a device's own file, before its number.
const DEVICE: &str = "/dev/ublkc";
/// The name of a socket's descriptor, around the number of its inode.
const SOCKET: (&str, char) = ("socket:[", ']');

/// The devices whose character devices the process has open, in no order.
pub(crate) fn devices(process: Pid) -> Vec<u32> {
    let number = |file: &Path| file.to_str()?.strip_prefix(DEVICE)?.parse().ok();
    open_files(process).iter().filter_map(|file| number(file)).collect()
}

/// Whether the process has a listening socket.
pub(crate) fn listens(process: Pid) -> bool {
    let inode = |file: &Path| -> Option<u64> {
        file.to_str()?.strip_prefix(SOCKET.0)?.strip_suffix(SOCKET.1)?.parse().ok()
    };
    let sockets: Vec<_> = open_files(process).iter().filter_map(|file| inode(file)).collect();
    let listening = |table: &str, parse: fn(&str) -> Option<u64>| {
        let table = folder(process).join("net").join(table);
        let text = fs::read_to_string(table).unwrap_or_default();
        text.lines().filter_map(parse).any(|inode| sockets.contains(&inode))
    };
    let tables =
        [("unix", unix_listener as fn(&str) -> _), ("tcp", tcp_listener), ("tcp6", tcp_listener)];
    !sockets.is_empty() && tables.iter().any(|(table, parse)| listening(table, *parse))
}

fn folder(process: Pid) -> PathBuf {
    Path::new("/proc").join(process.to_string())
}

fn open_files(process: Pid) -> Vec<PathBuf> {
    let Ok(files) = fs::read_dir(folder(process).join("fd")) else { return Vec::new() };
    files.flatten().filter_map(|file| fs::read_link(file.path()).ok()).collect()
}

/// The inode of a Unix socket that listens, by its line in `net/unix`: the fourth field has the
/// flag `__SO_ACCEPTCON`.
fn unix_listener(line: &str) -> Option<u64> {
    const ACCEPTS: u32 = 1 << 16;
    let mut fields = line.split_whitespace().skip(3);
    let flags = u32::from_str_radix(fields.next()?, 16).ok()?;
    let inode = fields.nth(2)?.parse().ok()?;
    (flags & ACCEPTS != 0).then_some(inode)
}

/// The inode of a TCP socket that listens, by its line in `net/tcp`: the fourth field is
/// `TCP_LISTEN`.
fn tcp_listener(line: &str) -> Option<u64> {
    const LISTEN: &str = "0A";
    let mut fields = line.split_whitespace().skip(3);
    let state = fields.next()?;
    let inode = fields.nth(5)?.parse().ok()?;
    (state == LISTEN).then_some(inode)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixListener;

    use super::*;

    const UNIX: [&str; 3] = [
        "Num       RefCount Protocol Flags    Type St Inode Path",
        "0000000000000000: 00000002 00000000 00010000 0001 01 35110 /run/a socket",
        "0000000000000000: 00000003 00000000 00000000 0001 03 35111",
    ];
    const TCP: [&str; 3] = [
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode",
        "   0: 0100007F:2A39 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0",
        "   1: 0100007F:2A39 0100007F:D3A6 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 20 4 30 10 -1",
    ];

    #[test]
    fn sockets_that_listen_are_found_in_the_tables() {
        assert_eq!(UNIX.map(unix_listener), [None, Some(35110), None]);
        assert_eq!(TCP.map(tcp_listener), [None, Some(4711), None]);
        for torn in ["", "0000000000000000: 00000002", "x y z 10000", "x y z 00010000 1 1 text"] {
            assert_eq!((unix_listener(torn), tcp_listener(torn)), (None, None));
        }
    }

    /// A separate process, since other tests of this process may have listening sockets.
    fn sleeper(socket: Option<std::process::Stdio>) -> std::process::Child {
        let mut command = std::process::Command::new("sleep");
        command.arg("1000").stdin(socket.unwrap_or(std::process::Stdio::null()));
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        command.spawn().expect("a process")
    }

    #[test]
    fn a_process_listens_where_it_has_a_listening_socket() {
        use std::os::fd::OwnedFd;
        let folder = tempfile::tempdir().expect("a folder");
        let tcp = TcpListener::bind("127.0.0.1:0").expect("a socket");
        let client = TcpStream::connect(tcp.local_addr().expect("an address")).expect("a client");
        let unix = UnixListener::bind(folder.path().join("socket")).expect("a socket");
        let stdin = |socket: OwnedFd| Some(std::process::Stdio::from(socket));
        let rows = [
            (stdin(tcp.into()), true),
            (stdin(unix.into()), true),
            (stdin(client.into()), false),
            (None, false),
        ];
        for (socket, expected) in rows {
            let mut process = sleeper(socket);
            let found = listens(Pid::from_child(&process));
            process.kill().and_then(|()| process.wait()).expect("it ends");
            assert_eq!(found, expected);
            // `/proc` shows no files of a process that has ended.
            assert!(!listens(Pid::from_child(&process)));
        }
        assert!(devices(rustix::process::getpid()).is_empty());
    }
}
