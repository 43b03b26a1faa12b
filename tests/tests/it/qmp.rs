//! `serve --qmp`: a session is compared with that of QEMU's own qemu-storage-daemon, answer by
//! answer.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use blockhouse_tests::qmp::{Qmp, accept_from};
use blockhouse_tests::{
    Scratch, Serve, Server, eventually,
    image_tool::{qemu_img, qemu_io, str},
    need, require, tool,
};
use serde_json::{Value, json};

use self::Step::{Differs, Keys, Same};

const MIB: u64 = 1 << 20;

/// Waits until a condition holds, which must become true.
pub(crate) fn wait_until(what: &str, condition: impl FnMut() -> bool) {
    assert!(eventually(Duration::from_secs(30), condition), "{what}");
}

/// A server with one raw disk, `first`.
pub(crate) fn serve(scratch: &Scratch) -> (Server, Qmp) {
    let image = scratch.image("first", MIB);
    let socket = scratch.socket("qmp");
    let server = Serve::new(scratch, image.path()).option("--qmp", &socket).start();
    let qmp = Qmp::connect(&socket);
    (server, qmp)
}

/// QEMU's storage daemon; killed on drop.
struct Peer(Child);

impl Peer {
    fn start(socket: &Path) -> (Self, Qmp) {
        let listener = UnixListener::bind(socket).expect("a new socket");
        let mut command = tool("qemu-storage-daemon");
        command.args(["--chardev", &format!("socket,id=c,path={}", str(socket))]);
        command.args(["--monitor", "chardev=c"]).stdin(Stdio::null());
        let mut peer = Self(command.spawn().expect("it is installed"));
        let stream = accept_from(&listener, &mut peer.0);
        (peer, Qmp::over(stream))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A message, and how its answers compare.
enum Step {
    /// The answers are the same, except for parts that always differ.
    Same(&'static str),
    /// The answers have the same keys.
    Keys(&'static str),
    /// Our answer differs: it has these words, for this reason.
    Differs(&'static str, &'static str, #[expect(dead_code, reason = "for readers")] &'static str),
}

/// The messages of the session. DIR stands for the folder of the images.
const SESSION: &[Step] = &[
    // Messages.
    Same("{'execute':'qmp_capabilities'}"),
    Keys("{'execute':'query-version','id':{'a':[1,2.5,'x']}}"),
    Same("{'exec-oob':'query-version','id':1}"),
    Same("{'execute':'x','id':'\\u00e9'}"),
    Same("{'execute':'query-version','foo':1}"),
    Same("{'foo':1}"),
    Same("{}"),
    Same("{'execute':1}"),
    Same("{'execute':'query-version','arguments':1}"),
    Same("{'execute':'query-version','arguments':{'a':1}}"),
    Same("[1]"),
    Same("'abc'"),
    Same("{'execute':\n'query-version',}"),
    Same("}"),
    Same("{'a' 1}"),
    Same("tru "),
    Same("{'a':1,'a':2}"),
    // Nodes.
    Same(
        "{'execute':'blockdev-add','arguments':{'driver':'file','node-name':'x','filename':'DIR/none'}}",
    ),
    Same("{'execute':'blockdev-add','arguments':{'driver':'file','filename':'DIR/d'}}"),
    Same("{'execute':'blockdev-add','arguments':{'node-name':'x'}}"),
    Same("{'execute':'blockdev-add','arguments':{'driver':'zz','node-name':'x'}}"),
    Same("{'execute':'blockdev-add','arguments':{'driver':'qcow2','file':'zz','node-name':'x'}}"),
    Same(
        "{'execute':'blockdev-add','arguments':{'driver':'file','node-name':'1','filename':'DIR/d'}}",
    ),
    Same(
        "{'execute':'blockdev-add','arguments':{'driver':'file','node-name':'f','filename':'DIR/d'}}",
    ),
    Same(
        "{'execute':'blockdev-add','arguments':{'driver':'file','node-name':'f','filename':'DIR/d'}}",
    ),
    Same(
        "{'execute':'blockdev-add','arguments':{'driver':'raw','node-name':'w','file':{'driver':'file','node-name':'w','filename':'DIR/d'}}}",
    ),
    Same("{'execute':'blockdev-add','arguments':{'driver':'qcow2','node-name':'d','file':'f'}}"),
    Same(
        "{'execute':'blockdev-add','arguments':{'driver':'qcow2','node-name':'o','file':{'driver':'file','node-name':'of','filename':'DIR/o'}}}",
    ),
    Same("{'execute':'blockdev-del','arguments':{'node-name':'zz'}}"),
    Same("{'execute':'blockdev-del','arguments':{'node-name':'f'}}"),
    Same("{'execute':'blockdev-add','arguments':{'driver':'null-co','node-name':'n','size':'x'}}"),
    Same(
        "{'execute':'blockdev-add','arguments':{'driver':'null-co','node-name':'n','size':1048576,'latency-ns':7}}",
    ),
    Same(
        "{'execute':'blockdev-add','arguments':{'driver':'raw','node-name':'m','file':{'driver':'null-aio','read-zeroes':true}}}",
    ),
    Same("{'execute':'blockdev-del','arguments':{'node-name':'n'}}"),
    Same("{'execute':'blockdev-del','arguments':{'node-name':'m'}}"),
    Differs(
        "{'execute':'blockdev-add','arguments':{'driver':'ssh','node-name':'n','path':'x','server':{'host':'x','port':'1'}}}",
        "Driver 'ssh' is not possible here",
        "no such images",
    ),
    Same("{'execute':'query-block'}"),
    Same("{'execute':'query-blockstats'}"),
    Same("{'execute':'block_resize','arguments':{'node-name':'d','size':2097152}}"),
    Same("{'execute':'block_resize','arguments':{'node-name':'d','size':1048576}}"),
    Same("{'execute':'block_resize','arguments':{'node-name':'zz','size':2097152}}"),
    Same("{'execute':'block_resize','arguments':{'size':2097152}}"),
    Same("{'execute':'block_resize','arguments':{'node-name':'d','size':1000}}"),
    Same("{'execute':'block_resize','arguments':{'node-name':'d','size':-512}}"),
    Same("{'execute':'block_resize','arguments':{'node-name':'d'}}"),
    Same("{'execute':'block_resize','arguments':{'node-name':'d','size':'1'}}"),
    Same("{'execute':'block_resize','arguments':{'node-name':1,'size':512}}"),
    Same("{'execute':'block_resize','arguments':{'device':'d','size':1048576}}"),
    Differs(
        "{'execute':'block_resize','arguments':{'node-name':'f','size':1048576}}",
        "the file below 'd'",
        "files below a format have no use by themselves",
    ),
    Same(
        "{'execute':'change-backing-file','arguments':{'device':'d','image-node-name':'d','backing-file':'b'}}",
    ),
    Same(
        "{'execute':'change-backing-file','arguments':{'device':'d','image-node-name':'zz','backing-file':'b'}}",
    ),
    Same(
        "{'execute':'block-set-write-threshold','arguments':{'node-name':'zz','write-threshold':1}}",
    ),
    Same("{'execute':'block-set-write-threshold','arguments':{'write-threshold':1}}"),
    // Snapshots.
    Same("{'execute':'blockdev-snapshot-internal-sync','arguments':{'device':'d','name':'s'}}"),
    Same("{'execute':'blockdev-snapshot-internal-sync','arguments':{'device':'d','name':'s'}}"),
    Same("{'execute':'blockdev-snapshot-internal-sync','arguments':{'device':'zz','name':'s'}}"),
    Same("{'execute':'blockdev-snapshot-internal-sync','arguments':{'device':'d','name':''}}"),
    Same(
        "{'execute':'blockdev-snapshot-delete-internal-sync','arguments':{'device':'d','name':'t'}}",
    ),
    Same("{'execute':'blockdev-snapshot-delete-internal-sync','arguments':{'device':'d'}}"),
    Keys(
        "{'execute':'blockdev-snapshot-delete-internal-sync','arguments':{'device':'d','name':'s'}}",
    ),
    // A snapshot whose name is the id of another.
    Same("{'execute':'blockdev-snapshot-internal-sync','arguments':{'device':'d','name':'s'}}"),
    Same("{'execute':'blockdev-snapshot-internal-sync','arguments':{'device':'d','name':'1'}}"),
    Keys(
        "{'execute':'blockdev-snapshot-delete-internal-sync','arguments':{'device':'d','id':'1'}}",
    ),
    Keys(
        "{'execute':'blockdev-snapshot-delete-internal-sync','arguments':{'device':'d','name':'1'}}",
    ),
    // Bitmaps.
    Same("{'execute':'block-dirty-bitmap-add','arguments':{'node':'d','name':'m'}}"),
    Same("{'execute':'block-dirty-bitmap-add','arguments':{'node':'d','name':'m'}}"),
    Same("{'execute':'x-debug-block-dirty-bitmap-sha256','arguments':{'node':'d','name':'m'}}"),
    Same("{'execute':'x-debug-block-dirty-bitmap-sha256','arguments':{'node':'d','name':'zz'}}"),
    Same("{'execute':'block-dirty-bitmap-remove','arguments':{'node':'d','name':'m'}}"),
    Same(
        "{'execute':'block-dirty-bitmap-add','arguments':{'node':'d','name':'b','persistent':true}}",
    ),
    Same(
        "{'execute':'block-dirty-bitmap-add','arguments':{'node':'d','name':'b','persistent':true}}",
    ),
    Same("{'execute':'block-dirty-bitmap-add','arguments':{'node':'zz','name':'b'}}"),
    Same(
        "{'execute':'block-dirty-bitmap-add','arguments':{'node':'d','name':'c','granularity':1000}}",
    ),
    Same(
        "{'execute':'block-dirty-bitmap-add','arguments':{'node':'d','name':'','granularity':65536}}",
    ),
    Same(
        "{'execute':'block-dirty-bitmap-add','arguments':{'node':'d','name':'c','granularity':65536,'disabled':true,'persistent':true}}",
    ),
    Same(
        "{'execute':'block-dirty-bitmap-merge','arguments':{'node':'d','target':'b','bitmaps':['c',{'node':'d','name':'c'}]}}",
    ),
    Same(
        "{'execute':'block-dirty-bitmap-merge','arguments':{'node':'d','target':'b','bitmaps':['zz']}}",
    ),
    Same("{'execute':'block-dirty-bitmap-disable','arguments':{'node':'d','name':'b'}}"),
    Same("{'execute':'block-dirty-bitmap-enable','arguments':{'node':'d','name':'b'}}"),
    Same("{'execute':'block-dirty-bitmap-clear','arguments':{'node':'d','name':'b'}}"),
    Same("{'execute':'block-dirty-bitmap-remove','arguments':{'node':'d','name':'zz'}}"),
    Same("{'execute':'block-dirty-bitmap-remove','arguments':{'node':'d','name':'c'}}"),
    Same("{'execute':'transaction','arguments':{'actions':[]}}"),
    Same("{'execute':'transaction','arguments':{'actions':[{'type':'zz','data':{}}]}}"),
    Same(
        "{'execute':'transaction','arguments':{'actions':[{'type':'block-dirty-bitmap-clear','data':{'node':'d','name':'b'}}]}}",
    ),
    Same(
        "{'execute':'transaction','arguments':{'actions':[{'type':'block-dirty-bitmap-clear','data':{'node':'d','name':'b'}},{'type':'abort','data':{}}]}}",
    ),
    Same(
        "{'execute':'transaction','arguments':{'actions':[{'type':'block-dirty-bitmap-clear','data':{'node':'d','name':'b'}},{'type':'block-dirty-bitmap-disable','data':{'node':'d','name':'b'}}]}}",
    ),
    // Overlays.
    Same("{'execute':'blockdev-snapshot','arguments':{'node':'zz','overlay':'o'}}"),
    Same("{'execute':'blockdev-snapshot','arguments':{'node':'d','overlay':'zz'}}"),
    Same("{'execute':'blockdev-snapshot','arguments':{'node':'d','overlay':'d'}}"),
    Same("{'execute':'blockdev-snapshot','arguments':{'node':'d','overlay':'o'}}"),
    Same("{'execute':'blockdev-snapshot-sync','arguments':{'device':'zz','snapshot-file':'x'}}"),
    Same("{'execute':'blockdev-snapshot-sync','arguments':{'snapshot-file':'x'}}"),
    Same("{'execute':'blockdev-snapshot-sync','arguments':{'node-name':'d','snapshot-file':'x'}}"),
    Same(
        "{'execute':'blockdev-snapshot-sync','arguments':{'node-name':'d','snapshot-file':'x','snapshot-node-name':'o'}}",
    ),
    Same(
        "{'execute':'blockdev-snapshot-sync','arguments':{'node-name':'d','snapshot-file':'DIR/x','snapshot-node-name':'1x'}}",
    ),
    Same(
        "{'execute':'blockdev-snapshot-sync','arguments':{'node-name':'d','snapshot-file':'x','snapshot-node-name':'s','mode':'zz'}}",
    ),
    // Copies that are impossible.
    Same(
        "{'execute':'blockdev-mirror','arguments':{'job-id':'m','device':'zz','target':'o','sync':'full'}}",
    ),
    Same(
        "{'execute':'blockdev-mirror','arguments':{'job-id':'m','device':'d','target':'zz','sync':'full'}}",
    ),
    Same(
        "{'execute':'blockdev-mirror','arguments':{'job-id':'m','device':'d','target':'d','sync':'full'}}",
    ),
    Same("{'execute':'blockdev-mirror','arguments':{'job-id':'m','device':'d','target':'o'}}"),
    Same(
        "{'execute':'blockdev-backup','arguments':{'job-id':'b','device':'zz','target':'o','sync':'full'}}",
    ),
    Same(
        "{'execute':'blockdev-backup','arguments':{'job-id':'b','device':'d','target':'zz','sync':'full'}}",
    ),
    Same(
        "{'execute':'blockdev-backup','arguments':{'job-id':'b','device':'d','target':'d','sync':'full'}}",
    ),
    Same(
        "{'execute':'blockdev-backup','arguments':{'job-id':'b','device':'d','target':'o','sync':'incremental'}}",
    ),
    Same(
        "{'execute':'blockdev-backup','arguments':{'job-id':'b','device':'d','target':'o','sync':'bitmap','bitmap':'zz','bitmap-mode':'never'}}",
    ),
    Same(
        "{'execute':'blockdev-backup','arguments':{'job-id':'b','device':'d','target':'o','sync':'bitmap','bitmap':'b'}}",
    ),
    Same(
        "{'execute':'blockdev-backup','arguments':{'job-id':'b','device':'d','target':'o','sync':'incremental','bitmap':'b','bitmap-mode':'never'}}",
    ),
    Same(
        "{'execute':'blockdev-backup','arguments':{'job-id':'b','device':'d','target':'o','sync':'full','bitmap-mode':'never'}}",
    ),
    Same(
        "{'execute':'blockdev-backup','arguments':{'job-id':'b','device':'d','target':'o','sync':'none','bitmap':'b','bitmap-mode':'never'}}",
    ),
    Same(
        "{'execute':'blockdev-backup','arguments':{'job-id':'b','device':'d','target':'o','sync':'full','bitmap':'b','bitmap-mode':'never'}}",
    ),
    // Exports.
    Same("{'execute':'nbd-server-add','arguments':{'device':'d'}}"),
    Same("{'execute':'nbd-server-stop'}"),
    Same(
        "{'execute':'nbd-server-start','arguments':{'addr':{'type':'unix','data':{'path':'SOCKET'}}}}",
    ),
    Same(
        "{'execute':'nbd-server-start','arguments':{'addr':{'type':'unix','data':{'path':'SOCKET'}}}}",
    ),
    Same(
        "{'execute':'block-export-add','arguments':{'id':'r','type':'nbd','node-name':'d','name':'r'}}",
    ),
    Same("{'execute':'block-export-del','arguments':{'id':'r'}}"),
    Same(
        "{'execute':'block-export-add','arguments':{'id':'e','type':'nbd','node-name':'d','writable':true}}",
    ),
    Same(
        "{'execute':'block-export-add','arguments':{'id':'e','type':'nbd','node-name':'d','name':'n','writable':true}}",
    ),
    Same(
        "{'execute':'block-export-add','arguments':{'id':'e2','type':'nbd','node-name':'d','name':'d','writable':true}}",
    ),
    Same("{'execute':'block-export-add','arguments':{'id':'e2','type':'nbd','node-name':'zz'}}"),
    Same(
        "{'execute':'block-export-add','arguments':{'id':'e 2','type':'nbd','node-name':'d','writable':true}}",
    ),
    Same("{'execute':'block-export-add','arguments':{'id':'e2','type':'zz','node-name':'d'}}"),
    Same("{'execute':'block-export-add','arguments':{'id':'e2','node-name':'d'}}"),
    Same(
        "{'execute':'block-export-add','arguments':{'id':'e2','type':'nbd','node-name':'d','foo':1}}",
    ),
    Same("{'execute':'nbd-server-add','arguments':{'device':'o','writable':true}}"),
    Same("{'execute':'nbd-server-add','arguments':{'device':'o','writable':true}}"),
    Same("{'execute':'nbd-server-add','arguments':{'device':'zz'}}"),
    Same("{'execute':'nbd-server-add','arguments':{'device':'o','description':3}}"),
    Same("{'execute':'block-export-del','arguments':{'id':'zz'}}"),
    Same("{'execute':'block-export-del','arguments':{'id':'e','mode':'zz'}}"),
    Same("{'execute':'nbd-server-remove','arguments':{'name':'zz'}}"),
    Same("{'execute':'nbd-server-remove','arguments':{'name':'o'}}"),
    Same("{'execute':'block-export-del','arguments':{'id':'e','mode':'hard'}}"),
    Same("{'execute':'nbd-server-stop'}"),
    // Jobs that do not exist.
    Same("{'execute':'query-jobs'}"),
    Same("{'execute':'query-block-jobs'}"),
    Same("{'execute':'job-cancel','arguments':{'id':'zz'}}"),
    Same("{'execute':'job-complete','arguments':{'id':'zz'}}"),
    Same("{'execute':'job-finalize','arguments':{'id':'zz'}}"),
    Same("{'execute':'block-job-cancel','arguments':{'device':'zz'}}"),
    Same("{'execute':'block-job-dismiss','arguments':{'id':'zz'}}"),
    Same("{'execute':'block-job-finalize','arguments':{'id':'zz'}}"),
    Same("{'execute':'block-job-set-speed','arguments':{'device':'zz','speed':1}}"),
    Same("{'execute':'block-stream','arguments':{'job-id':'j 1','device':'o'}}"),
    Same("{'execute':'block-stream','arguments':{'device':'o'}}"),
    Same("{'execute':'block-stream','arguments':{'job-id':'j','device':'zz'}}"),
    Same("{'execute':'block-stream','arguments':{'job-id':'j'}}"),
    Same("{'execute':'object-add','arguments':{'qom-type':'iothread','id':'i'}}"),
    Same("{'execute':'object-add','arguments':{'qom-type':'iothread','id':'i'}}"),
    Same("{'execute':'object-del','arguments':{'id':'i'}}"),
    Same("{'execute':'object-del','arguments':{'id':'i'}}"),
    Differs(
        "{'execute':'chardev-remove','arguments':{'id':'c'}}",
        "has not been found",
        "there are no character devices",
    ),
    Same("{'execute':'block_set_io_throttle','arguments':{}}"),
];

/// Makes the images of one of the servers.
fn images(scratch: &Scratch, folder: &str) -> String {
    let folder = scratch.path(folder);
    std::fs::create_dir(&folder).expect("a folder");
    let path = |name: &str| folder.join(name).to_str().expect("a path").to_owned();
    for name in ["d", "e", "t", "s"] {
        qemu_img(&["create", "-q", "-f", "qcow2", &path(name), "1M"]).success();
    }
    qemu_io("qcow2", Path::new(&path("e")), &["write -P 7 0 1M"]);
    // A base that a commit writes to must have only one overlay.
    for (overlay, base) in [("o", "b"), ("p", "b"), ("c", "cb")] {
        if !Path::new(&path(base)).exists() {
            qemu_img(&["create", "-q", "-f", "qcow2", &path(base), "1M"]).success();
            qemu_io("qcow2", Path::new(&path(base)), &["write -P 7 0 64k"]);
        }
        let words = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", base, &path(overlay)];
        qemu_img(&words).success();
    }
    str(&folder).to_owned()
}

/// Removes parts that always differ.
fn without_moments(mut value: Value) -> Value {
    match &mut value {
        Value::Object(object) => {
            object.remove("timestamp");
            object.values_mut().for_each(|value| *value = without_moments(value.take()));
        }
        Value::Array(list) => {
            list.iter_mut().for_each(|value| *value = without_moments(value.take()));
        }
        _ => {}
    }
    value
}

/// The keys of a value, recursively.
fn keys(value: &Value) -> Value {
    match value {
        Value::Object(object) => {
            object.iter().map(|(key, value)| (key.clone(), keys(value))).collect()
        }
        Value::Array(list) => list.iter().map(keys).collect(),
        _ => Value::Null,
    }
}

/// Both servers, each with its own images.
struct Both {
    scratch: Scratch,
    _server: Server,
    _peer: Peer,
    ours: Qmp,
    theirs: Qmp,
    folders: [String; 2],
}

impl Both {
    fn start() -> Result<Self, String> {
        need::tools(&["qemu-storage-daemon", "qemu-img", "qemu-io"])?;
        let scratch = Scratch::new();
        let folders = [images(&scratch, "ours"), images(&scratch, "theirs")];
        let (first, socket) = (scratch.image("first", MIB), scratch.socket("qmp"));
        let server = Serve::new(&scratch, first.path())
            .option("--qmp", &socket)
            .option("--sandbox-allow", &folders[0])
            .start();
        let ours = Qmp::connect(&socket);
        let (peer, theirs) = Peer::start(&scratch.socket("peer"));
        Ok(Self { scratch, _server: server, _peer: peer, ours, theirs, folders })
    }

    /// Starts both servers with the node o, mid over o, and top over mid.
    fn start_with_chain() -> Result<Self, String> {
        let mut both = Self::start()?;
        both.ask_same(&add("o"));
        for (over, below) in [("mid", "o"), ("top", "mid")] {
            for folder in &both.folders {
                let path = Path::new(folder).join(over);
                let words = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", below, str(&path)];
                qemu_img(&words).success();
            }
            both.ask_same(&add(over).replace("'file':", &format!("'backing':'{below}','file':")));
        }
        Ok(both)
    }

    /// The answers of both to a message.
    fn ask(&mut self, message: &str) -> [Value; 2] {
        let sockets = ["ours", "theirs"].map(|name| self.scratch.socket(name));
        let of = |index: usize| {
            let message = message.replace("DIR", &self.folders[index]);
            message.replace("SOCKET", str(&sockets[index]))
        };
        let [ours, theirs] = [of(0), of(1)];
        let answers = [(&mut self.ours, ours, 0), (&mut self.theirs, theirs, 1)];
        answers.map(|(qmp, message, index)| {
            let text = qmp.ask(&message).to_string().replace(&self.folders[index], "DIR");
            without_moments(serde_json::from_str(&text).expect("JSON"))
        })
    }

    /// The answer of both to a message, which must be the same.
    fn ask_same(&mut self, message: &str) -> Value {
        let [ours, theirs] = self.ask(message);
        assert_eq!(ours, theirs, "{message}");
        ours
    }

    /// Waits until the only job of both, which was ready, is paused.
    fn wait_for_standby(&mut self) {
        let mut told = [Value::Null, Value::Null];
        let is_standby = || {
            told = self.ask("{'execute':'query-block-jobs'}").map(|answer| {
                let job = &answer["return"][0];
                json!([job["status"], job["paused"], job["ready"]])
            });
            told == [json!(["standby", true, true]), json!(["standby", true, true])]
        };
        assert!(eventually(Duration::from_secs(60), is_standby), "{told:?}");
    }

    fn events_until(&mut self, job: &str, status: &str) -> [Vec<Value>; 2] {
        [&mut self.ours, &mut self.theirs]
            .map(|qmp| qmp.events_until(job, status).into_iter().map(without_moments).collect())
    }

    /// Waits for the end of a job. Its events and statuses must be the same in both, except for
    /// those that QEMU sends only for a slow job.
    fn same_statuses_until_end(&mut self, job: &str) {
        let [ours, theirs] = self.events_until(job, "null").map(|mut events| {
            events.retain(is_sure);
            let statuses = events.iter();
            let statuses =
                statuses.map(|event| (event["event"].clone(), event["data"]["status"].clone()));
            statuses.collect::<Vec<_>>()
        });
        assert_eq!(ours, theirs);
    }

    /// The backing file of the node top, which must be the same in both, and so must its depth.
    fn same_backing_of_top(&mut self) -> Value {
        let [ours, theirs] = self.ask("{'execute':'query-named-block-nodes'}").map(|answer| {
            let nodes = answer["return"].as_array().cloned().unwrap_or_default();
            let top = nodes.into_iter().find(|node| node["node-name"] == "top").expect("a node");
            (top["backing_file"].clone(), top["backing_file_depth"].clone())
        });
        assert_eq!(ours, theirs);
        ours.0
    }
}

#[test]
fn a_session_is_answered_as_by_qemu() {
    let mut both = require!(Both::start());
    assert_eq!(
        keys(&both.ours.greeting["QMP"]["version"]),
        keys(&both.theirs.greeting["QMP"]["version"])
    );
    assert_eq!(both.ours.greeting["QMP"]["capabilities"], json!([]));
    for step in SESSION {
        match step {
            Same(message) => _ = both.ask_same(message),
            Keys(message) => {
                let [ours, theirs] = both.ask(message);
                assert_eq!(keys(&ours), keys(&theirs), "{message}");
            }
            Differs(message, words, _) => {
                let [ours, theirs] = both.ask(message);
                assert_ne!(ours, theirs, "{message}: differs no longer");
                let desc = ours["error"]["desc"].as_str().unwrap_or_default();
                assert!(desc.contains(words), "{message}: {ours}");
            }
        }
    }
    let told = [&mut both.ours, &mut both.theirs].map(|qmp| {
        let events = std::mem::take(&mut qmp.events).into_iter().map(without_moments);
        events.collect::<Vec<_>>()
    });
    assert_eq!(told[0], told[1]);
    assert_eq!(told[0].len(), 3, "{told:?}");
}

#[test]
fn nodes_have_the_keys_of_qemu() {
    let mut both = require!(Both::start());
    both.ask_same("{'execute':'blockdev-add','arguments':{'driver':'qcow2','node-name':'p','file':{'driver':'file','node-name':'pf','filename':'DIR/p'}}}");
    both.ask_same("{'execute':'block-dirty-bitmap-add','arguments':{'node':'p','name':'b','persistent':true}}");
    both.ask_same(
        "{'execute':'blockdev-snapshot-internal-sync','arguments':{'device':'p','name':'s'}}",
    );
    let find = |answer: &Value, name: &str| {
        let nodes = answer["return"].as_array().expect("a list").iter();
        let mut node = nodes.clone().find(|node| node["node-name"] == name).expect(name).clone();
        // Times and allocated sizes always differ.
        node["image"]["actual-size"].take();
        node["image"]["snapshots"].take();
        if let Some(image) = node["image"].get_mut("backing-image") {
            image["actual-size"].take();
        }
        // The file's length differs, because metadata is at other offsets.
        if name == "pf" {
            node["image"]["virtual-size"].take();
        }
        node
    };
    for flat in ["true", "false"] {
        let message =
            format!("{{'execute':'query-named-block-nodes','arguments':{{'flat':{flat}}}}}");
        let [ours, theirs] = both.ask(&message);
        for name in ["p", "pf"] {
            let (mut ours, mut theirs) = (find(&ours, name), find(&theirs, name));
            // QEMU shows default values there, of the cluster size and of backing files, which are
            // not nodes in our server.
            [&mut ours, &mut theirs].into_iter().for_each(|node| {
                if let Some(image) =
                    node["image"].get_mut("backing-image").and_then(Value::as_object_mut)
                {
                    image.remove("cluster-size");
                    image.remove("actual-size");
                }
            });
            assert_eq!(ours, theirs, "{name}, flat {flat}");
        }
    }
    // A node that another node uses, and the order of nodes.
    both.ask_same("{'execute':'blockdev-add','arguments':{'driver':'file','node-name':'ef','filename':'DIR/e'}}");
    both.ask_same(
        "{'execute':'blockdev-add','arguments':{'driver':'qcow2','node-name':'e','file':'ef'}}",
    );
    both.ask_same("{'execute':'blockdev-del','arguments':{'node-name':'ef'}}");
    let added = both.ask("{'execute':'query-named-block-nodes'}").map(|answer| {
        let nodes = answer["return"].as_array().expect("a list").iter();
        let names = nodes.filter_map(|node| node["node-name"].as_str());
        names
            .filter(|name| ["e", "ef", "p", "pf"].contains(name))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    });
    assert_eq!(added, [["e", "ef", "p", "pf"]; 2]);
    let [ours, theirs] =
        both.ask("{'execute':'query-blockstats','arguments':{'query-nodes':true}}");
    let stats = |answer: &Value| {
        let nodes = answer["return"].as_array().expect("a list").iter();
        keys(&nodes.clone().find(|node| node["node-name"] == "p").expect("the node")["stats"])
    };
    assert_eq!(stats(&ours), stats(&theirs));
}

/// A message that adds a node over a file of its name.
fn add(node: &str) -> String {
    format!(
        "{{'execute':'blockdev-add','arguments':{{'driver':'qcow2','node-name':'{node}','file':{{'driver':'file','filename':'DIR/{node}'}}}}}}"
    )
}

#[test]
fn a_stream_ends_at_a_base() {
    let mut both = require!(Both::start_with_chain());
    let stream = |base: &str| {
        format!("{{'execute':'block-stream','arguments':{{'job-id':'j','device':'top',{base}}}}}")
    };
    for base in ["'base-node':'zz'", "'base-node':'o','base':'DIR/o'", "'base':1"] {
        both.ask_same(&stream(base));
    }
    both.ask_same(&stream("'base-node':'o'"));
    // QEMU's progress counts bytes that it examines, ours bytes that it copies, which are 0 here.
    both.same_statuses_until_end("j");
    assert_eq!(both.same_backing_of_top(), "DIR/o");
}

#[test]
fn a_commit_of_an_image_behind_the_disk_completes_by_itself() {
    let mut both = require!(Both::start_with_chain());
    let commit = |given: &str| {
        format!("{{'execute':'block-commit','arguments':{{'job-id':'j','device':'top',{given}}}}}")
    };
    for given in [
        "'top-node':'zz'",
        "'top':'zz'",
        "'top-node':'mid','top':'DIR/mid'",
        "'top-node':'mid','base-node':'top'",
        "'top-node':'mid','base-node':'mid'",
        "'top-node':'mid','base-node':'o','base':'DIR/o'",
        "'top-node':'mid','base':'DIR/top'",
        "'base-node':'mid','backing-file':'x'",
    ] {
        both.ask_same(&commit(given));
    }
    both.ask_same(&commit("'top-node':'mid','base-node':'o','backing-file':'./o'"));
    both.same_statuses_until_end("j");
    both.same_backing_of_top();
}

#[test]
fn jobs_have_the_statuses_and_events_of_qemu() {
    let mut both = require!(Both::start());
    ["o", "p", "c"].iter().for_each(|node| _ = both.ask_same(&add(node)));
    // A stream that is cancelled after a while.
    both.ask_same("{'execute':'block-stream','arguments':{'job-id':'k','device':'p','speed':1}}");
    both.ask_same("{'execute':'job-cancel','arguments':{'id':'k'}}");
    let [ours, theirs] = both.events_until("k", "null");
    assert_eq!(keys(&json!(ours)), keys(&json!(theirs)), "{ours:#?} {theirs:#?}");
    // A stream, which completes by itself.
    both.ask_same("{'execute':'block-stream','arguments':{'job-id':'j','device':'o','speed':1}}");
    let taken = "{'execute':'block-stream','arguments':{'job-id':'j','device':'p'}}";
    both.ask_same(taken);
    let [ours, theirs] = both.ask("{'execute':'query-block-jobs'}");
    assert_eq!(keys(&ours), keys(&theirs), "{ours} {theirs}");
    let [ours, theirs] = both.ask("{'execute':'query-jobs'}");
    assert_eq!(keys(&ours), keys(&theirs), "{ours} {theirs}");
    for (command, times) in [
        ("job-pause", 2),
        ("job-resume", 2),
        ("job-complete", 1),
        ("job-dismiss", 1),
        ("job-finalize", 1),
    ] {
        let message = format!("{{'execute':'{command}','arguments':{{'id':'j'}}}}");
        (0..times).for_each(|_| _ = both.ask_same(&message));
    }
    both.ask_same("{'execute':'block-job-pause','arguments':{'device':'j'}}");
    both.ask_same("{'execute':'block-job-resume','arguments':{'device':'j'}}");
    both.ask_same("{'execute':'block-job-set-speed','arguments':{'device':'j','speed':0}}");
    // QEMU's job may be resumed before it has paused.
    let [ours, theirs] = both.events_until("j", "null").map(|mut events| {
        events.retain(is_sure);
        events
    });
    assert_eq!(ours, theirs, "{ours:#?} {theirs:#?}");
    assert_eq!(both.ask_same("{'execute':'query-jobs'}"), json!({ "return": [] }));
    // A commit, which waits until it is asked to complete, and is listed until it is dismissed.
    both.ask_same(
        "{'execute':'block-commit','arguments':{'job-id':'c','device':'c','auto-dismiss':false}}",
    );
    let [ours, theirs] = both.events_until("c", "BLOCK_JOB_READY");
    assert_eq!(ours, theirs);
    both.ask_same("{'execute':'job-complete','arguments':{'id':'c'}}");
    let [ours, theirs] = both.events_until("c", "concluded");
    assert_eq!(ours, theirs);
    both.ask_same("{'execute':'query-jobs'}");
    both.ask_same("{'execute':'query-block-jobs'}");
    both.ask_same("{'execute':'job-dismiss','arguments':{'id':'c'}}");
    let [ours, theirs] = both.events_until("c", "null");
    assert_eq!(ours, theirs);
}

/// Whether QEMU sends an event also for a fast job.
fn is_sure(event: &Value) -> bool {
    !["paused", "running", "standby"].iter().any(|status| event["data"]["status"] == *status)
}

#[test]
fn copies_have_the_statuses_and_events_of_qemu() {
    let mut both = require!(Both::start());
    ["e", "t"].iter().for_each(|node| _ = both.ask_same(&add(node)));
    both.ask_same("{'execute':'blockdev-backup','arguments':{'job-id':'b','device':'e','target':'t','sync':'full'}}");
    let told = |both: &mut Both, job: &str, last: &str| {
        let [ours, theirs] = both.events_until(job, last).map(|mut events| {
            events.retain(is_sure);
            // Our server does not count the first sector, which has the mark until the end.
            for event in &mut events {
                let data = event["data"].as_object_mut().expect("an object");
                data.retain(|key, _| key != "len" && key != "offset");
            }
            events
        });
        assert_eq!(ours, theirs, "{ours:#?} {theirs:#?}");
    };
    told(&mut both, "b", "null");
    // A mirror that ends as a copy, and one that switches to the other node.
    for (name, end, arguments) in
        [("m", "block-job-cancel", "'device':'m'"), ("n", "job-complete", "'id':'n'")]
    {
        both.ask_same(&format!("{{'execute':'blockdev-mirror','arguments':{{'job-id':'{name}','device':'e','target':'t','sync':'full'}}}}"));
        told(&mut both, name, "BLOCK_JOB_READY");
        let [ours, theirs] = both.ask("{'execute':'query-block-jobs'}");
        assert_eq!(keys(&ours), keys(&theirs));
        both.ask_same(&format!("{{'execute':'job-pause','arguments':{{'id':'{name}'}}}}"));
        both.wait_for_standby();
        both.ask_same(&format!("{{'execute':'job-resume','arguments':{{'id':'{name}'}}}}"));
        both.ask_same(&format!("{{'execute':'{end}','arguments':{{{arguments}}}}}"));
        told(&mut both, name, "null");
    }
    // A backup for clients.
    both.ask_same("{'execute':'blockdev-del','arguments':{'node-name':'e'}}");
    both.ask_same(&add("s").replace("'driver':'qcow2'", "'driver':'qcow2','backing':'t'"));
    both.ask_same("{'execute':'blockdev-backup','arguments':{'job-id':'p','device':'t','target':'s','sync':'none'}}");
    both.ask_same("{'execute':'query-jobs'}");
    both.ask_same("{'execute':'query-block-jobs'}");
    both.ask_same("{'execute':'blockdev-del','arguments':{'node-name':'s'}}");
    both.ask_same("{'execute':'job-cancel','arguments':{'id':'p'}}");
    told(&mut both, "p", "null");
}

#[test]
fn commands_are_told_and_each_is_there() {
    let scratch = Scratch::new();
    let (server, mut qmp) = serve(&scratch);
    let told = qmp.get("query-commands", json!({}));
    let names: Vec<_> = told
        .as_array()
        .expect("a list")
        .iter()
        .map(|one| one["name"].as_str().expect("a name").to_owned())
        .collect();
    assert!(names.len() > 40, "{names:?}");
    for name in names.iter().filter(|name| *name != "quit") {
        let request = json!({ "execute": name, "arguments": { "no-such-argument": 1 } });
        let answer = qmp.ask(&request.to_string());
        let class = &answer["error"]["class"];
        assert!(*class == "GenericError" || name == "qmp_capabilities", "{name}: {answer}");
    }
    server.stop();
}

#[test]
fn commands_are_qemus_and_others_of_them_are_not_found() {
    let mut both = require!(Both::start());
    let names = |answer: &Value| -> Vec<String> {
        let list = answer["return"].as_array().expect("a list").iter();
        list.map(|one| one["name"].as_str().expect("a name").to_owned()).collect()
    };
    let [ours, theirs] = both.ask("{'execute':'query-commands'}").map(|answer| names(&answer));
    assert!(ours.iter().all(|name| theirs.contains(name)), "{ours:?}");
    for name in theirs.iter().filter(|name| !ours.contains(name)) {
        let answer = both.ours.ask(&json!({ "execute": name }).to_string());
        let found = json!({ "class": "CommandNotFound", "desc": format!("The command {name} has not been found") });
        assert_eq!(answer["error"], found);
    }
}
