//! The format as it is and was, byte by byte.

use super::*;

fn offer() -> Message {
    let file = |path: &str, has_tail| File { path: path.into(), has_tail, has_flushed: false };
    Message::Offer(Offer {
        images: vec![Image { files: vec![file("a.qcow2", true), file("base", false)] }],
        sockets: vec![Socket {
            address: Address::Tcp { host: "::1".into(), port: 10809 },
            has_file: false,
            exports: vec![("disk".into(), 0)],
        }],
        devices: vec![Listening { address: Address::Unix(b"v".to_vec()), has_file: false }],
        control: Some(Listening { address: Address::Unix(b"s".to_vec()), has_file: true }),
    })
}

fn yours() -> Message {
    let connection = Connection {
        socket: 0,
        export: "disk".into(),
        framing: FramingName::Structured,
        contexts: vec![(1, ContextName::Allocation), (2, ContextName::DirtyBitmap("b".into()))],
        is_used: true,
        received: 28,
    };
    Message::Yours(Yours {
        flush_failures: vec![[Some(5), None]],
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
    let addresses = RingAddresses { descriptors: 1, available: 2, used: 3, log: Some(4) };
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
        memory: vec![Region { guest: 0, size: 4096, user: 1 << 47, offset: 8192 }],
        inflight: Some(Inflight { size: 4160, offset: 0, queues: 1, entries: 256 }),
        log: Some(Log { size: 1, offset: 2 }),
        has_log_call: true,
        has_backend_channel: false,
        write_cache: Cache { is_volatile: true, driver_flushes: true, is_restored: false },
        vrings: vec![running, polled],
    }
}

/// Another program of this version reads exactly this: to change it, raise [`VERSION`] and keep these among those of
/// older versions.
#[test]
fn version_3_is_written_and_read_as_it_always_was() {
    assert_eq!(VERSION, 3);
    let texts = [
        (
            offer(),
            r#"{"offer":{"images":[{"files":[{"path":"a.qcow2","has-tail":true,"has-flushed":false},{"path":"base","has-tail":false,"has-flushed":false}]}],"sockets":[{"address":{"tcp":{"host":"::1","port":10809}},"has-file":false,"exports":[["disk",0]]}],"devices":[{"address":{"unix":[118]},"has-file":false}],"control":{"address":{"unix":[115]},"has-file":true}}}"#,
        ),
        (Message::Ready, r#""ready""#),
        (Message::Refused { why: "no".into() }, r#"{"refused":{"why":"no"}}"#),
        (
            yours(),
            r#"{"yours":{"flush-failures":[[5,null]],"connections":[{"socket":0,"export":"disk","framing":"structured","contexts":[[1,"allocation"],[2,{"dirty-bitmap":"b"}]],"is-used":true,"received":28}],"frontends":[null,{"features":18446744073709551615,"protocol-features":9,"memory":[{"guest":0,"size":4096,"user":140737488355328,"offset":8192}],"inflight":{"size":4160,"offset":0,"queues":1,"entries":256},"log":{"size":1,"offset":2},"has-log-call":true,"has-backend-channel":false,"write-cache":{"is-volatile":true,"driver-flushes":true,"is-restored":false},"vrings":[{"size":256,"addresses":{"descriptors":1,"available":2,"used":3,"log":4},"base":65535,"kick":"event","has-call":true,"has-error":true,"is-enabled":true,"is-running":true},{"size":0,"addresses":null,"base":0,"kick":"polled","has-call":false,"has-error":false,"is-enabled":false,"is-running":false}]}]}}"#,
        ),
        (Message::Mine, r#""mine""#),
    ];
    for (message, text) in texts {
        assert_eq!(serde_json::to_string(&message).expect("plain values"), text);
        assert_eq!(serde_json::from_str::<Message>(text).expect(text), message);
    }
}

#[test]
fn what_is_not_known_is_refused() {
    for text in [r#"{"refused":{"why":"no","x":1}}"#, r#"{"refused":{}}"#, r#""soon""#] {
        assert!(serde_json::from_str::<Message>(text).is_err(), "{text}");
    }
}
