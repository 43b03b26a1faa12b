//! The exact bytes of the format's present version.

use blockhouse_disk::{DetectZeroes, Discard};

use super::counters::{Done, Requests, StageOf};
use super::disk::{Export, File, Limits, MovedTo, Opened, StandsOn};
use super::*;

fn opened(limits: Option<Limits>) -> Opened {
    Opened {
        name: "disk".into(),
        path: b"/a".to_vec(),
        format: Some("qcow2".into()),
        read_only: false,
        cache: "none".into(),
        discard: Discard::Unmap,
        detect_zeroes: DetectZeroes::Unmap,
        block_sizes: [None; 3],
        hold_seconds: None,
        threshold: None,
        copy_on_read: false,
        prefetch: None,
        create: Some(512),
        snapshot: None,
        allow_paths: vec![b"/b".to_vec()],
        allow_remote: true,
        no_references: false,
        without_backing: false,
        data_file: None,
        bitmaps: vec!["c".into()],
        bitmaps_behind: false,
        bitmaps_in: None,
        limits,
    }
}

fn offer() -> Message {
    let file = |path: &str, has_tail| File { path: path.into(), has_tail, has_flushed: false };
    let limits = Limits {
        group: Some("g".into()),
        operations: [Some(1), None, Some(3)],
        bytes: [None, Some(5), None],
        burst: Some((250, 60_000_000_000)),
    };
    let disk = Disk {
        opened: opened(Some(limits.clone())),
        moved: Some(MovedTo {
            path: b"/m".to_vec(),
            format: "raw".into(),
            cache: "writeback".into(),
        }),
        is_protected: true,
        limits: Some(limits),
        write_threshold: None,
        files: vec![file("a.qcow2", true), file("base", false)],
        stands_on: None,
    };
    let exports = vec![Export::Nbd("nbd://h/".into()), Export::VhostUser(b"/v".to_vec())];
    let device = Listening { address: Address::Unix(b"v".to_vec()), has_file: false };
    Message::Offer(Offer {
        disks: vec![disk],
        configured: vec![Configured { opened: opened(None), exports }],
        sockets: vec![Socket {
            address: Address::Tcp { host: "::1".into(), port: 10809 },
            has_file: false,
            needs_tls: true,
            exports: vec![("disk".into(), 0)],
            read_only: Vec::new(),
            without_depth: Vec::new(),
            descriptions: Vec::new(),
            added: None,
        }],
        devices: vec![Device { socket: device, disk: 0, read_only: false }],
        ublk: vec![Ublk { id: 3, disk: 0, image: b"/a".to_vec() }],
        control: Some(Listening { address: Address::Unix(b"s".to_vec()), has_file: true }),
        measured_since: 1_700_000_000,
    })
}

fn counts() -> Counts {
    let done = || Done { bytes: 8, time: 9, buckets: vec![(0, 1), (7, 2)], errors: vec![(5, 1)] };
    let (export, operation) = ("nbd".to_owned(), "read".to_owned());
    let stage = StageOf { stage: "host".into(), operation: operation.clone(), done: done() };
    Counts {
        requests: vec![Requests { export: export.clone(), operation, started: 3, done: done() }],
        stages: vec![stage],
        clients: vec![(export, 4)],
        totals: [1, 2, 3, 4],
        cache: [5, 6],
        delayed: [7, 8],
    }
}

fn yours() -> Message {
    let connection = Connection {
        socket: 0,
        export: "disk".into(),
        framing: Framing::Structured,
        contexts: vec![(1, MetaContext::Allocation), (2, MetaContext::DirtyBitmap("b".into()))],
        is_used: true,
        received: 28,
    };
    Message::Yours(Yours {
        flush_failures: vec![[Some(5), None]],
        counts: vec![counts()],
        connections: vec![connection],
        frontends: vec![None, Some(frontend())],
    })
}

fn frontend() -> Frontend {
    let polled = Vring {
        size: 0,
        addresses: None,
        base: 0,
        kick: Some(KickName::Polled),
        has_call: false,
        has_error: false,
        is_enabled: false,
        is_running: false,
    };
    let addresses = UserAddresses { descriptors: 1, available: 2, used: 3, log: Some(4) };
    let running = Vring {
        size: 256,
        addresses: Some(addresses),
        base: 65535,
        kick: Some(KickName::Event),
        has_call: true,
        has_error: true,
        is_enabled: true,
        is_running: true,
    };
    Frontend {
        features: u64::MAX,
        protocol_features: 9,
        memory: vec![MemoryRegion { guest: 0, size: 4096, user: 1 << 47, offset: 8192 }],
        inflight: Some(InflightDescription { size: 4160, offset: 0, queues: 1, entries: 256 }),
        log: Some(LogDescription { size: 1, offset: 2 }),
        has_log_call: true,
        has_backend_channel: false,
        write_cache: Cache { is_volatile: true, driver_flushes: true, is_restored: false },
        vrings: vec![running, polled],
    }
}

/// Another program of this version reads exactly these texts. To change them, raise [`VERSION`] and
/// keep these as texts of an older version.
#[test]
fn version_5_is_written_and_read_as_it_always_was() {
    assert_eq!(VERSION, 5);
    let texts = [
        (
            offer(),
            r#"{"offer":{"disks":[{"opened":{"name":"disk","path":[47,97],"format":"qcow2","read-only":false,"cache":"none","discard":"unmap","detect-zeroes":"unmap","create":512,"snapshot":null,"allow-paths":[[47,98]],"allow-remote":true,"bitmaps":["c"],"limits":{"group":"g","operations":[1,null,3],"bytes":[null,5,null],"burst":[250,60000000000]}},"moved":{"path":[47,109],"format":"raw","cache":"writeback"},"is-protected":true,"limits":{"group":"g","operations":[1,null,3],"bytes":[null,5,null],"burst":[250,60000000000]},"files":[{"path":"a.qcow2","has-tail":true,"has-flushed":false},{"path":"base","has-tail":false,"has-flushed":false}]}],"configured":[{"opened":{"name":"disk","path":[47,97],"format":"qcow2","read-only":false,"cache":"none","discard":"unmap","detect-zeroes":"unmap","create":512,"snapshot":null,"allow-paths":[[47,98]],"allow-remote":true,"bitmaps":["c"],"limits":null},"exports":[{"nbd":"nbd://h/"},{"vhost-user":[47,118]}]}],"sockets":[{"address":{"tcp":{"host":"::1","port":10809}},"has-file":false,"needs-tls":true,"exports":[["disk",0]]}],"devices":[{"socket":{"address":{"unix":[118]},"has-file":false},"disk":0}],"ublk":[{"id":3,"disk":0,"image":[47,97]}],"control":{"address":{"unix":[115]},"has-file":true},"measured-since":1700000000}}"#,
        ),
        (Message::Ready, r#""ready""#),
        (Message::Refused { why: "no".into() }, r#"{"refused":{"why":"no"}}"#),
        (
            yours(),
            r#"{"yours":{"flush-failures":[[5,null]],"counts":[{"requests":[{"export":"nbd","operation":"read","started":3,"done":{"bytes":8,"time":9,"buckets":[[0,1],[7,2]],"errors":[[5,1]]}}],"stages":[{"stage":"host","operation":"read","done":{"bytes":8,"time":9,"buckets":[[0,1],[7,2]],"errors":[[5,1]]}}],"clients":[["nbd",4]],"totals":[1,2,3,4],"cache":[5,6],"delayed":[7,8]}],"connections":[{"socket":0,"export":"disk","framing":"structured","contexts":[[1,"allocation"],[2,{"dirty-bitmap":"b"}]],"is-used":true,"received":28}],"frontends":[null,{"features":18446744073709551615,"protocol-features":9,"memory":[{"guest":0,"size":4096,"user":140737488355328,"offset":8192}],"inflight":{"size":4160,"offset":0,"queues":1,"entries":256},"log":{"size":1,"offset":2},"has-log-call":true,"has-backend-channel":false,"write-cache":{"is-volatile":true,"driver-flushes":true,"is-restored":false},"vrings":[{"size":256,"addresses":{"descriptors":1,"available":2,"used":3,"log":4},"base":65535,"kick":"event","has-call":true,"has-error":true,"is-enabled":true,"is-running":true},{"size":0,"addresses":null,"base":0,"kick":"polled","has-call":false,"has-error":false,"is-enabled":false,"is-running":false}]}]}}"#,
        ),
        (Message::Mine, r#""mine""#),
    ];
    for (message, text) in texts {
        assert_eq!(serde_json::to_string(&message).expect("plain values"), text);
        assert_eq!(serde_json::from_str::<Message>(text).expect(text), message);
    }
}

#[test]
fn later_fields_are_read_as_they_were_written() {
    let said = Opened {
        hold_seconds: Some(60),
        threshold: Some("10%".into()),
        no_references: true,
        without_backing: true,
        data_file: Some("/vm/data".into()),
        bitmaps_behind: true,
        bitmaps_in: Some((b"/d".to_vec(), true)),
        ..opened(None)
    };
    let text = serde_json::to_string(&said).expect("plain values");
    assert_eq!(serde_json::from_str::<Opened>(&text).expect("it was written"), said);
    let Message::Offer(Offer { mut disks, mut sockets, .. }) = offer() else { panic!("an offer") };
    let stands_on = Some(StandsOn { disk: 3, depth: 2 });
    let said = Disk { stands_on, ..disks.remove(0) };
    let text = serde_json::to_string(&said).expect("plain values");
    assert_eq!(serde_json::from_str::<Disk>(&text).expect("it was written"), said);
    let said = Socket {
        without_depth: vec!["disk".into()],
        descriptions: vec![("disk".into(), "of the guest".into())],
        ..sockets.remove(0)
    };
    let text = serde_json::to_string(&said).expect("plain values");
    assert_eq!(serde_json::from_str::<Socket>(&text).expect("it was written"), said);
}

#[test]
fn what_is_not_known_is_refused() {
    for text in [r#"{"refused":{"why":"no","x":1}}"#, r#"{"refused":{}}"#, r#""soon""#] {
        assert!(serde_json::from_str::<Message>(text).is_err(), "{text}");
    }
}

#[test]
fn what_was_counted_is_counted_on() {
    let counts = counts();
    assert_eq!(Counts::from(&counts.earlier()), counts);
}

#[test]
fn a_disk_is_described_completely() {
    let Message::Offer(Offer { disks, configured, .. }) = offer() else { panic!("an offer") };
    for disk in disks {
        let config = disk.opened.clone().config().expect("a description");
        assert_eq!(Opened::of(&config).expect("a description"), disk.opened);
        let limits = disk.limits.expect("limits");
        let config = limits.clone().config().expect("limits");
        assert_eq!(Limits::of(&config).expect("limits"), Some(limits));
        let moved = disk.moved.expect("it was moved");
        assert_eq!(MovedTo::from(&moved.clone().moved().expect("a place")), moved);
    }
    let sizes = [Some(4096), None, Some(1 << 20)];
    let opened = Opened { block_sizes: sizes, ..opened(None) };
    let config = opened.clone().config().expect("a description");
    assert_eq!(Opened::of(&config).expect("a description"), opened);
    for disk in configured {
        let exports = disk.exports.clone();
        let config = disk.disk().expect("a description");
        assert_eq!(Configured::of(&config).expect("a description").exports, exports);
    }
}
