//! `query-qmp-schema`: the arguments and results of commands, and the members of events.
//!
//! [`TYPES`] is written by hand, in a notation of its own: a line for each entity. A test compares
//! it with the commands. The black-box tests compare it with QEMU's schema: each entity is a subset
//! of QEMU's entity of the same name.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// `command NAME MEMBER... -> TYPE`, `event NAME MEMBER...`, `object NAME MEMBER... | TAG
/// CASE=TYPE...`, `enum NAME WORD...` and `alternate NAME TYPE...`. A member is `NAME:TYPE`, or
/// `NAME?:TYPE` where it may be left out; `*TYPE` stands for all members of that type. `[TYPE]` is
/// a list.
const TYPES: &str = "
command qmp_capabilities enable?:[QMPCapability]
enum QMPCapability
command query-version -> VersionInfo
object VersionInfo qemu:VersionTriple package:str
object VersionTriple major:int minor:int micro:int
command query-commands -> [CommandInfo]
object CommandInfo name:str
command query-qmp-schema -> [SchemaInfo]
object SchemaInfo name:str meta-type:SchemaMetaType | meta-type builtin=SchemaInfoBuiltin enum=SchemaInfoEnum array=SchemaInfoArray object=SchemaInfoObject alternate=SchemaInfoAlternate command=SchemaInfoCommand event=SchemaInfoEvent
enum SchemaMetaType builtin enum array object alternate command event
object SchemaInfoBuiltin json-type:JSONType
enum JSONType string number int boolean null object array value
object SchemaInfoEnum members:[SchemaInfoEnumMember] values:[str]
object SchemaInfoEnumMember name:str
object SchemaInfoArray element-type:str
object SchemaInfoObject members:[SchemaInfoObjectMember] tag?:str variants?:[SchemaInfoObjectVariant]
object SchemaInfoObjectMember name:str type:str default?:any
object SchemaInfoObjectVariant case:str type:str
object SchemaInfoAlternate members:[SchemaInfoAlternateMember]
object SchemaInfoAlternateMember type:str
object SchemaInfoCommand arg-type:str ret-type:str
object SchemaInfoEvent arg-type:str
command quit
command query-named-block-nodes flat?:bool -> [BlockDeviceInfo]
object BlockDeviceInfo file:str node-name?:str ro:bool drv:str backing_file?:str backing_file_depth:int active:bool encrypted:bool detect_zeroes:DetectZeroes bps:int bps_rd:int bps_wr:int iops:int iops_rd:int iops_wr:int image:ImageInfo cache:BlockdevCacheInfo write_threshold:int dirty-bitmaps?:[BlockDirtyInfo]
enum DetectZeroes off on unmap
object BlockdevCacheInfo writeback:bool direct:bool no-flush:bool
object BlockDirtyInfo name?:str count:int granularity:int recording:bool busy:bool persistent:bool inconsistent?:bool
object ImageInfo filename:str format:str dirty-flag?:bool actual-size?:int virtual-size:int cluster-size?:int encrypted?:bool backing-filename?:str full-backing-filename?:str backing-filename-format?:str snapshots?:[SnapshotInfo] format-specific?:ImageInfoSpecific backing-image?:ImageInfo
object SnapshotInfo id:str name:str vm-state-size:int date-sec:int date-nsec:int vm-clock-sec:int vm-clock-nsec:int icount?:int
object ImageInfoSpecific type:ImageInfoSpecificKind | type qcow2=Qcow2Wrapper file=FileWrapper
enum ImageInfoSpecificKind qcow2 file
object Qcow2Wrapper data:Qcow2Info
object Qcow2Info compat:str extended-l2?:bool lazy-refcounts?:bool corrupt?:bool refcount-bits:int compression-type:Qcow2Compression
enum Qcow2Compression zlib zstd
object FileWrapper data:Nothing
object Nothing
command query-block -> [BlockInfo]
object BlockInfo device:str type:str removable:bool locked:bool
command query-blockstats query-nodes?:bool -> [BlockStats]
object BlockStats node-name?:str stats:BlockDeviceStats parent?:BlockStats
object BlockDeviceStats rd_bytes:int wr_bytes:int zone_append_bytes:int unmap_bytes:int rd_operations:int wr_operations:int zone_append_operations:int flush_operations:int unmap_operations:int rd_total_time_ns:int wr_total_time_ns:int zone_append_total_time_ns:int flush_total_time_ns:int unmap_total_time_ns:int wr_highest_offset:int rd_merged:int wr_merged:int zone_append_merged:int unmap_merged:int failed_rd_operations:int failed_wr_operations:int failed_zone_append_operations:int failed_flush_operations:int failed_unmap_operations:int invalid_rd_operations:int invalid_wr_operations:int invalid_zone_append_operations:int invalid_flush_operations:int invalid_unmap_operations:int account_invalid:bool account_failed:bool timed_stats:[TimedStats]
object TimedStats interval_length:int min_rd_latency_ns:int max_rd_latency_ns:int avg_rd_latency_ns:int min_wr_latency_ns:int max_wr_latency_ns:int avg_wr_latency_ns:int min_zone_append_latency_ns:int max_zone_append_latency_ns:int avg_zone_append_latency_ns:int min_flush_latency_ns:int max_flush_latency_ns:int avg_flush_latency_ns:int avg_rd_queue_depth:number avg_wr_queue_depth:number avg_zone_append_queue_depth:number
command blockdev-add *BlockdevOptions
object BlockdevOptions driver:BlockdevDriver node-name?:str discard?:Discard active?:bool cache?:BlockdevCacheOptions read-only?:bool auto-read-only?:bool force-share?:bool detect-zeroes?:DetectZeroes | driver file=BlockdevFile host_device=BlockdevFile nbd=BlockdevNbd null-aio=BlockdevNull null-co=BlockdevNull raw=BlockdevFormat qcow2=BlockdevQcow2 luks=BlockdevLuks vdi=BlockdevFormat vhdx=BlockdevFormat vmdk=BlockdevFormat vpc=BlockdevFormat throttle=BlockdevThrottle
enum BlockdevDriver file host_device nbd null-aio null-co raw qcow2 luks vdi vhdx vmdk vpc throttle
enum Discard ignore unmap
object BlockdevCacheOptions direct?:bool no-flush?:bool
object BlockdevFile filename:str locking?:OnOffAuto aio?:Aio drop-cache?:bool
object BlockdevNull size?:int latency-ns?:int read-zeroes?:bool
object BlockdevNbd server:ServerAddress export?:str tls-creds?:str tls-hostname?:str
object ServerAddress type:SocketType | type inet=InetAddress unix=UnixAddress
enum OnOffAuto auto on
enum Aio threads native io_uring
object BlockdevFormat file:BlockdevRef
alternate BlockdevRef BlockdevOptions str
alternate Backing str null
object BlockdevQcow2 file:BlockdevRef lazy-refcounts?:bool pass-discard-request?:bool pass-discard-other?:bool cache-size?:int l2-cache-size?:int l2-cache-entry-size?:int refcount-cache-size?:int cache-clean-interval?:int backing?:Backing data-file?:BlockdevRef encrypt?:Qcow2Encryption
object Qcow2Encryption format:Qcow2EncryptionFormat | format luks=LuksOptions
enum Qcow2EncryptionFormat luks
object LuksOptions key-secret?:str
object BlockdevLuks file:BlockdevRef key-secret?:str
object BlockdevThrottle throttle-group:str file:BlockdevRef
command blockdev-del node-name:str
command blockdev-reopen options:[BlockdevOptions]
command blockdev-set-active node-name?:str active:bool
command blockdev-create job-id:str options:CreateOptions
object CreateOptions driver:CreateDriver | driver file=CreateFile qcow2=CreateQcow2
enum CreateDriver file qcow2
object CreateFile filename:str size:int preallocation?:PreallocMode nocow?:bool
enum PreallocMode off
object CreateQcow2 file:BlockdevRef data-file?:BlockdevRef size:int version?:Qcow2Version data-file-raw?:bool extended-l2?:bool backing-file?:str backing-fmt?:BackingFormat cluster-size?:int preallocation?:PreallocMode lazy-refcounts?:bool refcount-bits?:int compression-type?:Qcow2Compression
enum Qcow2Version v3
enum BackingFormat qcow2 raw luks vdi vhdx vmdk vpc
command object-add *ObjectOptions
object ObjectOptions qom-type:ObjectType id:str | qom-type iothread=IothreadProperties secret=SecretProperties throttle-group=ThrottleGroupProperties tls-creds-psk=TlsPskProperties tls-creds-x509=TlsX509Properties
enum ObjectType iothread secret throttle-group tls-creds-psk tls-creds-x509
object IothreadProperties aio-max-batch?:int thread-pool-min?:int thread-pool-max?:int poll-max-ns?:int poll-grow?:int poll-shrink?:int
object SecretProperties format?:SecretFormat data?:str file?:str
enum SecretFormat raw
object ThrottleGroupProperties limits?:ThrottleLimits x-iops-total?:int x-iops-total-max?:int x-iops-total-max-length?:int x-iops-read?:int x-iops-read-max?:int x-iops-read-max-length?:int x-iops-write?:int x-iops-write-max?:int x-iops-write-max-length?:int x-bps-total?:int x-bps-total-max?:int x-bps-total-max-length?:int x-bps-read?:int x-bps-read-max?:int x-bps-read-max-length?:int x-bps-write?:int x-bps-write-max?:int x-bps-write-max-length?:int x-iops-size?:int
object ThrottleLimits iops-total?:int iops-total-max?:int iops-total-max-length?:int iops-read?:int iops-read-max?:int iops-read-max-length?:int iops-write?:int iops-write-max?:int iops-write-max-length?:int bps-total?:int bps-total-max?:int bps-total-max-length?:int bps-read?:int bps-read-max?:int bps-read-max-length?:int bps-write?:int bps-write-max?:int bps-write-max-length?:int iops-size?:int
object TlsPskProperties verify-peer?:bool dir?:str endpoint?:TlsEndpoint username?:str
object TlsX509Properties verify-peer?:bool dir?:str endpoint?:TlsEndpoint sanity-check?:bool
enum TlsEndpoint client server
command object-del id:str
command block_resize device?:str node-name?:str size:int
command block-set-write-threshold node-name:str write-threshold:int
command change-backing-file device:str image-node-name:str backing-file:str
command query-block-exports -> [BlockExportInfo]
object BlockExportInfo id:str type:BlockExportType node-name:str shutting-down:bool
enum BlockExportType nbd vhost-user-blk
command block-export-add *BlockExportOptions
object BlockExportOptions type:BlockExportType id:str fixed-iothread?:bool iothread?:str node-name:str writable?:bool writethrough?:bool allow-inactive?:bool | type nbd=BlockExportNbd vhost-user-blk=BlockExportVhostUser
object BlockExportNbd name?:str description?:str bitmaps?:[BitmapOrName] allocation-depth?:bool
object BlockExportVhostUser addr:SocketAddress logical-block-size?:int num-queues?:int
object SocketAddress type:UnixSocket | type unix=UnixAddress
enum UnixSocket unix
object UnixAddress path:str
command block-export-del id:str mode?:RemoveMode
enum RemoveMode safe hard
command nbd-server-start addr:SocketAddressLegacy tls-creds?:str max-connections?:int
object SocketAddressLegacy type:SocketType | type inet=InetWrapper unix=UnixWrapper
enum SocketType inet unix
object InetWrapper data:InetAddress
object InetAddress host:str port:str
object UnixWrapper data:UnixAddress
command nbd-server-add name?:str description?:str device:str writable?:bool bitmap?:str
command nbd-server-remove name:str mode?:RemoveMode
command nbd-server-stop
command blockdev-snapshot *Snapshot
object Snapshot node:str overlay:str
command blockdev-snapshot-sync *SnapshotSync
object SnapshotSync device?:str node-name?:str snapshot-file:str snapshot-node-name?:str format?:str mode?:NewImageMode
enum NewImageMode existing absolute-paths
command blockdev-snapshot-internal-sync *InternalSnapshot
object InternalSnapshot device:str name:str
command blockdev-snapshot-delete-internal-sync device:str id?:str name?:str -> SnapshotInfo
command block-dirty-bitmap-add *BitmapAdd
object BitmapAdd node:str name:str granularity?:int persistent?:bool disabled?:bool
command block-dirty-bitmap-remove *Bitmap
command block-dirty-bitmap-clear *Bitmap
command block-dirty-bitmap-enable *Bitmap
command block-dirty-bitmap-disable *Bitmap
object Bitmap node:str name:str
command block-dirty-bitmap-merge *BitmapMerge
object BitmapMerge node:str target:str bitmaps:[BitmapOrName]
alternate BitmapOrName str Bitmap
command x-debug-block-dirty-bitmap-sha256 *Bitmap -> BitmapSha256
object BitmapSha256 sha256:str
command query-jobs -> [JobInfo]
object JobInfo id:str type:JobType status:JobStatus current-progress:int total-progress:int error?:str
enum JobType commit stream mirror backup create
enum JobStatus created running paused ready standby waiting pending aborting concluded null
command query-block-jobs -> [BlockJobInfo]
object BlockJobInfo type:JobType device:str len:int offset:int busy:bool paused:bool speed:int io-status:IoStatus ready:bool status:JobStatus auto-finalize:bool auto-dismiss:bool error?:str | type mirror=BlockJobInfoMirror
object BlockJobInfoMirror actively-synced:bool
enum IoStatus ok
command block-stream job-id?:str device:str base?:str base-node?:str speed?:int on-error?:OnError filter-node-name?:str auto-finalize?:bool auto-dismiss?:bool backing-mask-protocol?:bool
enum OnError report
command block-commit job-id?:str device:str base-node?:str base?:str top-node?:str top?:str backing-file?:str backing-mask-protocol?:bool speed?:int on-error?:OnError filter-node-name?:str auto-finalize?:bool auto-dismiss?:bool
command blockdev-mirror job-id?:str device:str target:str speed?:int sync:MirrorSyncMode granularity?:int buf-size?:int on-source-error?:OnError on-target-error?:OnError filter-node-name?:str copy-mode?:MirrorCopyMode auto-finalize?:bool auto-dismiss?:bool
enum MirrorSyncMode top full
enum MirrorCopyMode background write-blocking
command blockdev-backup *Backup
object Backup job-id?:str device:str sync:BackupSyncMode speed?:int bitmap?:str bitmap-mode?:BitmapSyncMode compress?:bool on-source-error?:OnError on-target-error?:OnError auto-finalize?:bool auto-dismiss?:bool filter-node-name?:str discard-source?:bool target:str
enum BackupSyncMode top full none incremental bitmap
enum BitmapSyncMode on-success never
command job-cancel id:str
command job-complete id:str
command job-dismiss id:str
command job-finalize id:str
command job-pause id:str
command job-resume id:str
command block-job-cancel device:str force?:bool
command block-job-complete device:str
command block-job-dismiss id:str
command block-job-finalize id:str
command block-job-pause device:str
command block-job-resume device:str
command block-job-set-speed device:str speed:int
command transaction actions:[TransactionAction] properties?:TransactionProperties
object TransactionAction type:ActionKind | type abort=AbortWrapper block-dirty-bitmap-add=BitmapAddWrapper block-dirty-bitmap-remove=BitmapWrapper block-dirty-bitmap-clear=BitmapWrapper block-dirty-bitmap-enable=BitmapWrapper block-dirty-bitmap-disable=BitmapWrapper block-dirty-bitmap-merge=BitmapMergeWrapper blockdev-backup=BackupWrapper blockdev-snapshot=SnapshotWrapper blockdev-snapshot-sync=SnapshotSyncWrapper blockdev-snapshot-internal-sync=InternalSnapshotWrapper
enum ActionKind abort block-dirty-bitmap-add block-dirty-bitmap-remove block-dirty-bitmap-clear block-dirty-bitmap-enable block-dirty-bitmap-disable block-dirty-bitmap-merge blockdev-backup blockdev-snapshot blockdev-snapshot-sync blockdev-snapshot-internal-sync
object AbortWrapper data:Nothing
object BitmapAddWrapper data:BitmapAdd
object BitmapWrapper data:Bitmap
object BitmapMergeWrapper data:BitmapMerge
object BackupWrapper data:Backup
object SnapshotWrapper data:Snapshot
object SnapshotSyncWrapper data:SnapshotSync
object InternalSnapshotWrapper data:InternalSnapshot
object TransactionProperties completion-mode?:CompletionMode
enum CompletionMode individual
event JOB_STATUS_CHANGE id:str status:JobStatus
event BLOCK_JOB_READY type:JobType device:str len:int offset:int speed:int
event BLOCK_JOB_PENDING type:JobType id:str
event BLOCK_JOB_COMPLETED type:JobType device:str len:int offset:int speed:int error?:str
event BLOCK_JOB_CANCELLED type:JobType device:str len:int offset:int speed:int
event BLOCK_EXPORT_DELETED id:str
event BLOCK_WRITE_THRESHOLD node-name:str amount-exceeded:int write-threshold:int
";

/// Builtin types, which need no line in [`TYPES`]: their names, and their JSON types.
const BUILTINS: [(&str, &str); 6] = [
    ("str", "string"),
    ("int", "int"),
    ("number", "number"),
    ("bool", "boolean"),
    ("null", "null"),
    ("any", "value"),
];

/// The schema, with only those commands for which `is_there` is true.
pub(super) fn schema(is_there: impl Fn(&str) -> bool) -> Value {
    let is_told = |entity: &Value| {
        entity["meta-type"] != "command" || entity["name"].as_str().is_some_and(&is_there)
    };
    entities().into_iter().filter(is_told).collect()
}

/// All entities of the schema.
fn entities() -> Vec<Value> {
    let lines: Vec<Vec<&str>> = TYPES
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>())
        .filter(|words| words.len() > 1)
        .collect();
    let mut made = Made::default();
    for words in &lines {
        let (kind, name, rest) = (words[0], words[1], &words[2..]);
        let entity = match kind {
            "command" => {
                let (members, returned) = cut(rest, "->");
                let arguments = made.arguments(name, members);
                let returned = returned.first().map_or("Nothing", |name| name);
                let returned = made.type_of(returned);
                json!({ "arg-type": arguments, "ret-type": returned })
            }
            "event" => json!({ "arg-type": made.arguments(name, rest) }),
            "object" => made.object(rest),
            "enum" => json!({
                "members": rest.iter().map(|word| json!({ "name": word })).collect::<Vec<_>>(),
                "values": rest,
            }),
            _ => json!({
                "members": rest.iter().map(|of| json!({ "type": of })).collect::<Vec<_>>(),
            }),
        };
        made.add(kind, name, entity);
    }
    for (name, json_type) in BUILTINS {
        made.add("builtin", name, json!({ "json-type": json_type }));
    }
    made.0.into_values().collect()
}

/// Entities by name.
#[derive(Default)]
struct Made(BTreeMap<String, Value>);

impl Made {
    fn add(&mut self, kind: &str, name: &str, mut entity: Value) {
        entity["meta-type"] = kind.into();
        entity["name"] = name.into();
        self.0.insert(name.to_owned(), entity);
    }

    /// The name of the object whose members are the arguments of a command or an event.
    fn arguments(&mut self, of: &str, members: &[&str]) -> String {
        match members {
            [] => "Nothing".to_owned(),
            [all] if all.starts_with('*') => all[1..].to_owned(),
            members => {
                let name = format!("{of}-arg");
                let object = self.object(members);
                self.add("object", &name, object);
                name
            }
        }
    }

    fn object(&mut self, words: &[&str]) -> Value {
        let (members, variants) = cut(words, "|");
        let members: Vec<Value> = members
            .iter()
            .filter_map(|member| member.split_once(':'))
            .map(|(name, of)| {
                let of = self.type_of(of);
                match name.strip_suffix('?') {
                    Some(name) => json!({ "name": name, "type": of, "default": null }),
                    None => json!({ "name": name, "type": of }),
                }
            })
            .collect();
        let Some((tag, cases)) = variants.split_first() else {
            return json!({ "members": members });
        };
        let cases: Vec<Value> = cases
            .iter()
            .filter_map(|case| case.split_once('='))
            .map(|(case, of)| json!({ "case": case, "type": of }))
            .collect();
        json!({ "members": members, "tag": tag, "variants": cases })
    }

    /// Returns the name of a type. A list type is added to the schema at its first use.
    fn type_of(&mut self, name: &str) -> String {
        if let Some(element) = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
            self.add("array", name, json!({ "element-type": element }));
        }
        name.to_owned()
    }
}

/// The words before `at`, and those after it.
fn cut<'a, 'b>(words: &'a [&'b str], at: &str) -> (&'a [&'b str], &'a [&'b str]) {
    match words.iter().position(|word| *word == at) {
        Some(index) => (&words[..index], &words[index + 1..]),
        None => (words, &[]),
    }
}
