//! The examples at the end of each `--help`, of the man pages and of the option reference.
//!
//! Invariants, which tests check: every command has at least one example; the parser accepts each
//! example, and each example works as typed. The images are disk.img (raw), disk.qcow2 (qcow2, with
//! a snapshot called before, and bitmaps called changes and week) and over.qcow2, whose backing
//! file is base.img.

use clap::Command;

/// A command line, and what it does.
pub struct Example {
    /// The purpose.
    pub purpose: &'static str,
    /// The line to type.
    pub line: &'static str,
}

const fn example(purpose: &'static str, line: &'static str) -> Example {
    Example { purpose, line }
}

/// The examples of each command, by its words after `blockhouse`.
const EXAMPLES: &[(&str, &[Example])] = &[
    (
        "",
        &[
            example("Make a disk of 20 GiB", "blockhouse create disk.qcow2 20G"),
            example("Serve it until Ctrl-C, and print where", "blockhouse serve disk.qcow2"),
            example("All options of a command, with examples", "blockhouse serve --help"),
        ],
    ),
    (
        "qemu-storage-daemon",
        &[
            example(
                "Serve an image to NBD clients",
                "blockhouse qemu-storage-daemon --blockdev file,node-name=d,filename=disk.img --nbd-server addr.type=unix,addr.path=disk.sock --export nbd,id=e,node-name=d",
            ),
            example(
                "Take commands of QMP at a socket",
                "blockhouse qemu-storage-daemon --chardev socket,id=c,path=qmp.sock,server=on --monitor c",
            ),
        ],
    ),
    (
        "bench",
        &[
            example("The gain of FUA in this folder", "blockhouse bench fua"),
            example("Everything, as a page with plots", "blockhouse bench all --html report.html"),
        ],
    ),
    (
        "qemu-bench",
        &[example(
            "Requests without a disk",
            "blockhouse qemu-bench -c 10000 'null-co://?size=1G'",
        )],
    ),
    (
        "attach",
        &[
            example(
                "The device is printed (needs the driver ublk_drv)",
                "blockhouse attach disk.qcow2",
            ),
            example("The same device each time", "blockhouse attach disk.img --id 5"),
        ],
    ),
    ("detach", &[example("Unmount what is on it first", "blockhouse detach /dev/ublkb5")]),
    (
        "serve",
        &[
            example(
                "To programs of this user, at a socket that is printed",
                "blockhouse serve disk.qcow2",
            ),
            example(
                "Over TCP, to this host alone",
                "blockhouse serve disk.img --nbd nbd://127.0.0.1:10809/disk",
            ),
            example(
                "At a Unix socket, each write durable when it is answered",
                "blockhouse serve disk.img --nbd 'nbd+unix:///?socket=disk.sock' --cache directsync",
            ),
            example(
                "With metrics for Prometheus and 'blockhouse top'",
                "blockhouse serve disk.qcow2 --metrics unix:metrics",
            ),
            example(
                "To this host, as /dev/ublkb0 (needs the driver ublk_drv)",
                "blockhouse serve disk.qcow2 --ublk 0",
            ),
            example(
                "To a virtual machine by vhost-user-blk",
                "blockhouse serve disk.qcow2 --vhost-user-blk disk.vu",
            ),
            example(
                "For backups: NBD clients may ask what has changed",
                "blockhouse serve disk.qcow2 --bitmap changes --nbd 'nbd+unix:///?socket=disk.sock'",
            ),
            example(
                "The disk as a snapshot has it, for reading",
                "blockhouse serve disk.qcow2 --snapshot before --nbd 'nbd+unix:///?socket=before.sock'",
            ),
            example(
                "With a socket for requests while guests write",
                "blockhouse serve disk.qcow2 --control control",
            ),
            example("For tools that speak to QEMU", "blockhouse serve disk.qcow2 --qmp qmp"),
        ],
    ),
    (
        "create",
        &[
            example("A raw image", "blockhouse create new.img 20G"),
            example("A qcow2 image", "blockhouse create -o cluster_size=128K new.qcow2 20G"),
            example(
                "An overlay: changes go into it, base.img stays as it is",
                "blockhouse create -b base.img -F raw overlay.qcow2",
            ),
            example("All options of a format", "blockhouse create -o help"),
        ],
    ),
    (
        "convert",
        &[
            example("Raw into qcow2, by the names", "blockhouse convert disk.img copy.qcow2"),
            example("Compressed", "blockhouse convert -c disk.img small.qcow2"),
            example(
                "The disk as a snapshot has it",
                "blockhouse convert -l before disk.qcow2 before.img",
            ),
            example(
                "Only what differs from base.img",
                "blockhouse convert -B base.img -F raw disk.img differs.qcow2",
            ),
            example("Out of a pipe", "blockhouse convert - piped.qcow2 < disk.img"),
            example("Into a pipe", "blockhouse convert disk.qcow2 - | gzip > disk.img.gz"),
            example("Two disks as one", "blockhouse convert disk.img disk.qcow2 both.img"),
        ],
    ),
    (
        "compare",
        &[
            example(
                "Exit status 0: the guest sees the same",
                "blockhouse compare disk.img disk.img",
            ),
            example(
                "Also holes and zeros must be in the same places",
                "blockhouse compare -s disk.img disk.img",
            ),
        ],
    ),
    (
        "dd",
        &[
            example("The first MiB", "blockhouse dd if=disk.img of=first.img bs=1M count=1"),
            example(
                "All but the first MiB, as qcow2",
                "blockhouse dd -O qcow2 if=disk.img of=rest.qcow2 bs=1M skip=1",
            ),
        ],
    ),
    (
        "check",
        &[
            example("Exit status 2: corrupt, 3: leaks", "blockhouse check disk.qcow2"),
            example("Give leaked space back", "blockhouse check --repair leaks disk.qcow2"),
            example("How far it is, in a script", "blockhouse check -p disk.qcow2"),
        ],
    ),
    (
        "info",
        &[
            example("For people", "blockhouse info disk.qcow2"),
            example("For scripts, with the keys of qemu-img", "blockhouse info --json disk.qcow2"),
            example("With all backing files", "blockhouse info --backing-chain over.qcow2"),
        ],
    ),
    ("map", &[example("Where the data is", "blockhouse map disk.qcow2")]),
    (
        "measure",
        &[
            example(
                "The space that a copy of the image would take",
                "blockhouse measure -O qcow2 disk.img",
            ),
            example(
                "The space that a new disk would take",
                "blockhouse measure -O qcow2 --size 20G",
            ),
        ],
    ),
    (
        "resize",
        &[
            example("To a size", "blockhouse resize disk.qcow2 2G"),
            example("By so much", "blockhouse resize disk.img +1G"),
        ],
    ),
    (
        "amend",
        &[
            example(
                "Refcounts may be written late",
                "blockhouse amend -o lazy_refcounts=on disk.qcow2",
            ),
            example("List the options that can be changed", "blockhouse amend -o help"),
        ],
    ),
    ("commit", &[example("Into base.img, which over.qcow2 names", "blockhouse commit over.qcow2")]),
    (
        "rebase",
        &[
            example(
                "Stand alone: copy what is needed",
                "blockhouse rebase --no-backing over.qcow2",
            ),
            example(
                "The backing file was moved, its content is the same",
                "blockhouse rebase -u -b ./base.img -F raw over.qcow2",
            ),
        ],
    ),
    (
        "snapshot",
        &[
            example("Take one", "blockhouse snapshot create disk.qcow2 now"),
            example("Go back to it", "blockhouse snapshot apply disk.qcow2 before"),
            example("List them as qemu-img does", "blockhouse snapshot -l disk.qcow2"),
        ],
    ),
    (
        "snapshot list",
        &[
            example("For people", "blockhouse snapshot list disk.qcow2"),
            example("For scripts", "blockhouse snapshot list --json disk.qcow2"),
        ],
    ),
    (
        "snapshot create",
        &[
            example(
                "Of an image that no program uses",
                "blockhouse snapshot create disk.qcow2 now",
            ),
            example(
                "Of one that is served, while guests write",
                "blockhouse snapshot create --control control disk.qcow2 now",
            ),
            example(
                "Outside of the image, also of a raw one",
                "blockhouse snapshot create --external next.qcow2 disk.img",
            ),
        ],
    ),
    ("snapshot apply", &[example("Go back to it", "blockhouse snapshot apply disk.qcow2 before")]),
    (
        "snapshot delete",
        &[
            example(
                "Of an image that no program uses",
                "blockhouse snapshot delete disk.qcow2 before",
            ),
            example(
                "Of one that is served",
                "blockhouse snapshot delete --control control disk.qcow2 before",
            ),
        ],
    ),
    (
        "snapshot rename",
        &[example("From before to monday", "blockhouse snapshot rename disk.qcow2 before monday")],
    ),
    (
        "bitmap",
        &[
            example("Record changes from now on", "blockhouse bitmap add disk.qcow2 monday"),
            example("Which there are", "blockhouse bitmap list disk.qcow2"),
        ],
    ),
    (
        "bitmap list",
        &[
            example("For people", "blockhouse bitmap list disk.qcow2"),
            example("For scripts", "blockhouse bitmap list --json disk.qcow2"),
        ],
    ),
    (
        "bitmap add",
        &[
            example("Record changes from now on", "blockhouse bitmap add disk.qcow2 monday"),
            example("To the nearest 4 KiB", "blockhouse bitmap add -g 4K disk.qcow2 monday"),
        ],
    ),
    ("bitmap remove", &[example("It is gone", "blockhouse bitmap remove disk.qcow2 changes")]),
    ("bitmap clear", &[example("Begin anew", "blockhouse bitmap clear disk.qcow2 changes")]),
    ("bitmap enable", &[example("Record again", "blockhouse bitmap enable disk.qcow2 changes")]),
    (
        "bitmap disable",
        &[example("Keep it as it is", "blockhouse bitmap disable disk.qcow2 changes")],
    ),
    (
        "bitmap merge",
        &[example(
            "All that either has recorded, in week",
            "blockhouse bitmap merge disk.qcow2 week changes",
        )],
    ),
    (
        "backup",
        &[
            example("All of it", "blockhouse backup disk.qcow2 monday.qcow2"),
            example(
                "The changes since a bitmap was begun",
                "blockhouse backup disk.qcow2 tuesday.qcow2 --incremental changes --base base.img",
            ),
        ],
    ),
    (
        "restore",
        &[
            example(
                "A moment, with all that is behind it",
                "blockhouse restore monday.qcow2 restored.img",
            ),
            example(
                "In the place of an image that is not used",
                "blockhouse restore --force monday.qcow2 disk.img",
            ),
        ],
    ),
    (
        "ctl",
        &[
            example("List the exports", "blockhouse ctl control exports"),
            example("All that can be asked", "blockhouse ctl --help"),
        ],
    ),
    ("ctl disks", &[example("For scripts", "blockhouse ctl control disks --json")]),
    ("ctl exports", &[example("As a table", "blockhouse ctl control exports")]),
    (
        "ctl open",
        &[example(
            "Beside what is served already",
            "blockhouse ctl control open disk.img --export \"nbd+unix:///?socket=$PWD/img.sock\"",
        )],
    ),
    (
        "ctl close",
        &[example("Also where clients use it", "blockhouse ctl control close disk.qcow2 --force")],
    ),
    (
        "ctl export",
        &[example("To a virtual machine", "blockhouse ctl control export disk.qcow2 disk.vu")],
    ),
    (
        "ctl unexport",
        &[example(
            "The list of exports, as JSON",
            "blockhouse ctl control unexport 'nbd+unix:///?socket=disk.sock'",
        )],
    ),
    ("ctl refresh", &[example("After lvextend", "blockhouse ctl control refresh disk.qcow2")]),
    (
        "ctl threshold",
        &[example(
            "Tell before the host is full",
            "blockhouse ctl control threshold disk.qcow2 1%",
        )],
    ),
    ("ctl resize", &[example("10 GiB more", "blockhouse ctl control resize disk.qcow2 +10G")]),
    (
        "ctl read-only",
        &[example(
            "While something else reads the image",
            "blockhouse ctl control read-only disk.qcow2 && blockhouse ctl control read-only disk.qcow2 off",
        )],
    ),
    ("ctl limits", &[example("Of all disks", "blockhouse ctl control limits")]),
    (
        "ctl limit",
        &[
            example("For itself", "blockhouse ctl control limit disk.qcow2 iops=500,bps=100M"),
            example("With others", "blockhouse ctl control limit disk.qcow2 group=slow,iops=1000"),
        ],
    ),
    (
        "ctl limit-group",
        &[example("More for all of them", "blockhouse ctl control limit-group slow iops=3000")],
    ),
    (
        "ctl fork",
        &[
            example(
                "Before an upgrade in the guest: the disk goes on in over2.qcow2",
                "blockhouse ctl control fork disk.img --overlay over2.qcow2",
            ),
            example(
                "Another machine's disk from what it is now",
                "blockhouse ctl control fork disk.img --child try=try.qcow2",
            ),
        ],
    ),
    (
        "ctl rollback",
        &[example(
            "After an upgrade in the guest that failed, when the guest is off",
            "blockhouse ctl control rollback disk.img",
        )],
    ),
    (
        "ctl snapshot",
        &[example("While guests write", "blockhouse ctl control snapshot create disk.qcow2 now")],
    ),
    (
        "ctl snapshot list",
        &[example("As a table", "blockhouse ctl control snapshot list disk.qcow2")],
    ),
    (
        "ctl snapshot create",
        &[example("While guests write", "blockhouse ctl control snapshot create disk.qcow2 now")],
    ),
    (
        "ctl snapshot delete",
        &[example("By its name", "blockhouse ctl control snapshot delete disk.qcow2 before")],
    ),
    (
        "ctl snapshot rename",
        &[example(
            "From before to monday",
            "blockhouse ctl control snapshot rename disk.qcow2 before monday",
        )],
    ),
    (
        "ctl bitmap",
        &[example("While guests write", "blockhouse ctl control bitmap add disk.qcow2 monday")],
    ),
    (
        "ctl bitmap list",
        &[example("And what they say", "blockhouse ctl control bitmap list disk.qcow2")],
    ),
    (
        "ctl bitmap add",
        &[example(
            "To the nearest 4 KiB",
            "blockhouse ctl control bitmap add -g 4K disk.qcow2 day",
        )],
    ),
    (
        "ctl bitmap remove",
        &[example("It is gone", "blockhouse ctl control bitmap remove disk.qcow2 changes")],
    ),
    (
        "ctl bitmap clear",
        &[example("Begin anew", "blockhouse ctl control bitmap clear disk.qcow2 changes")],
    ),
    (
        "ctl bitmap enable",
        &[example("Record again", "blockhouse ctl control bitmap enable disk.qcow2 changes")],
    ),
    (
        "ctl bitmap disable",
        &[example("Keep it as it is", "blockhouse ctl control bitmap disable disk.qcow2 changes")],
    ),
    (
        "ctl bitmap merge",
        &[example(
            "A day into its week",
            "blockhouse ctl control bitmap merge disk.qcow2 week changes",
        )],
    ),
    ("ctl backup", &[example("Which there are", "blockhouse ctl control backup list")]),
    (
        "ctl backup begin",
        &[
            example(
                "With a bitmap for the next increment",
                "blockhouse ctl control backup begin disk.qcow2 --bitmap monday --export \"nbd+unix:///?socket=$PWD/backup.sock\"",
            ),
            example(
                "With what has changed since",
                "blockhouse ctl control backup begin disk.qcow2 --since changes --export \"nbd+unix:///?socket=$PWD/backup.sock\"",
            ),
        ],
    ),
    ("ctl backup end", &[example("It was fetched", "blockhouse ctl control backup end backup1")]),
    ("ctl backup list", &[example("As a table", "blockhouse ctl control backup list")]),
    ("ctl jobs", &[example("How far they are", "blockhouse ctl control jobs")]),
    (
        "ctl mirror",
        &[
            example("To a new file", "blockhouse ctl control mirror disk.qcow2 new.qcow2"),
            example(
                "To another host's server",
                "blockhouse ctl control mirror disk.qcow2 nbd://host/disk --overwrite --speed 200M",
            ),
        ],
    ),
    (
        "ctl commit",
        &[
            example("Into the backing file", "blockhouse ctl control commit overlay.qcow2"),
            example(
                "In the background of the guest's work",
                "blockhouse ctl control commit overlay.qcow2 --speed 50M --job merge",
            ),
            example(
                "Layers behind the disk into the lowest one, without their files",
                "blockhouse ctl control commit overlay.qcow2 --top c.qcow2 --base a.qcow2 --delete",
            ),
        ],
    ),
    (
        "ctl stream",
        &[
            example(
                "All of it into the overlay",
                "blockhouse ctl control stream overlay.qcow2 --speed 50M",
            ),
            example(
                "What is between the overlay and a base that is kept",
                "blockhouse ctl control stream overlay.qcow2 --base base.qcow2",
            ),
        ],
    ),
    (
        "ctl job",
        &[example(
            "The guest continues on the target",
            "blockhouse ctl control job mirror1 complete",
        )],
    ),
    (
        "ctl job complete",
        &[
            example(
                "The guest continues on the target",
                "blockhouse ctl control job mirror1 complete",
            ),
            example(
                "The guest continues on another host",
                "blockhouse ctl control job mirror1 complete --hand-over",
            ),
        ],
    ),
    ("ctl job cancel", &[example("As if not begun", "blockhouse ctl control job mirror1 cancel")]),
    ("ctl job pause", &[example("For a while", "blockhouse ctl control job mirror1 pause")]),
    ("ctl job resume", &[example("After a pause", "blockhouse ctl control job mirror1 resume")]),
    (
        "ctl job speed",
        &[example("100 MiB a second", "blockhouse ctl control job mirror1 speed 100M")],
    ),
    (
        "ctl job dismiss",
        &[example("One that has ended", "blockhouse ctl control job mirror1 dismiss")],
    ),
    ("ctl reload", &[example("After serve.toml has changed", "blockhouse ctl control reload")]),
    ("ctl stats", &[example("Of all disks", "blockhouse ctl control stats")]),
    (
        "ctl events",
        &[example(
            "Clients that come and leave",
            "blockhouse ctl control events client.came client.left",
        )],
    ),
    ("ctl version", &[example("With all methods", "blockhouse ctl control version")]),
    (
        "ctl call",
        &[example(
            "A method of docs/control.md",
            "blockhouse ctl control call disk.stats '{\"disk\":\"disk.qcow2\"}'",
        )],
    ),
    (
        "top",
        &[
            example(
                "A server that was started with --metrics unix:metrics",
                "blockhouse top metrics",
            ),
            example("Twice a second", "blockhouse top --interval 0.5 metrics"),
        ],
    ),
    (
        "upgrade",
        &[
            example(
                "To the program that --upgrade-to of the server names, or to the one that runs",
                "blockhouse upgrade --control control",
            ),
            example(
                "To one of several that --upgrade-to names",
                "blockhouse upgrade --control control --binary \"$(command -v blockhouse)\"",
            ),
            example(
                "Where clients use TLS: they have to connect again",
                "blockhouse upgrade --control control --disconnect-tls",
            ),
        ],
    ),
    (
        "vmstate",
        &[
            example(
                "In QEMU's monitor: migrate \"exec:...\"",
                "blockhouse vmstate save disk.qcow2 now",
            ),
            example(
                "QEMU's option: -incoming \"exec:...\"",
                "blockhouse vmstate load disk.qcow2 now",
            ),
        ],
    ),
    (
        "vmstate save",
        &[
            example(
                "In QEMU's monitor: migrate \"exec:...\"",
                "blockhouse vmstate save disk.qcow2 now",
            ),
            example("Compressed", "blockhouse vmstate save --compress zstd disk.qcow2 now"),
        ],
    ),
    (
        "vmstate load",
        &[example(
            "QEMU's option: -incoming \"exec:...\"",
            "blockhouse vmstate load disk.qcow2 now",
        )],
    ),
];

/// The examples of the command with these words after `blockhouse`; empty if there is no such
/// command.
pub fn of(path: &str) -> &'static [Example] {
    EXAMPLES.iter().find(|(known, _)| *known == path).map_or(&[], |(_, examples)| examples)
}

/// Adds the examples to the end of the help of the command and of all its subcommands.
pub fn add_to(command: Command) -> Command {
    add_below(command, "")
}

fn add_below(command: Command, path: &str) -> Command {
    let names: Vec<String> =
        command.get_subcommands().map(|command| command.get_name().to_owned()).collect();
    let command = names.iter().fold(command, |command, name| {
        command.mut_subcommand(name, |command| add_below(command, &join(path, name)))
    });
    command.after_help(as_text(of(path)))
}

/// The words of the subcommand `name` of the command with the words `path`.
pub fn join(path: &str, name: &str) -> String {
    match path {
        "" => name.to_owned(),
        _ => format!("{path} {name}"),
    }
}

fn as_text(examples: &[Example]) -> String {
    let lines =
        examples.iter().map(|Example { purpose, line }| format!("\n  # {purpose}\n  {line}"));
    format!("Examples:{}", lines.collect::<String>())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// The words of `command` and of all its subcommands.
    fn paths(command: &Command, path: &str, all: &mut Vec<String>) {
        all.push(path.to_owned());
        command.get_subcommands().for_each(|command| {
            paths(command, &join(path, command.get_name()), all);
        });
    }

    #[test]
    fn each_command_has_examples_and_each_example_its_command() {
        let mut all = Vec::new();
        paths(&crate::command(), "", &mut all);
        for path in &all {
            assert!(!of(path).is_empty(), "blockhouse {path}: no example");
        }
        for (path, examples) in EXAMPLES {
            assert!(all.iter().any(|known| known == path), "blockhouse {path}: no such command");
            for Example { line, .. } in *examples {
                // The command's words occur in this order; in `ctl` the socket is between them.
                let mut words = line.split(' ');
                let mut wanted = ["blockhouse"].into_iter().chain(path.split_whitespace());
                assert!(wanted.all(|word| words.any(|one| one == word)), "{line}: not of {path}");
            }
        }
    }

    /// The words of a line, as a shell divides it: quotes of either kind enclose one word.
    fn words(line: &str) -> Vec<String> {
        let mut words = vec![String::new()];
        let mut quote = None;
        for letter in line.chars() {
            match (quote, letter) {
                (None, ' ') => words.push(String::new()),
                (None, '\'' | '"') => quote = Some(letter),
                (Some(open), _) if open == letter => quote = None,
                _ => words.last_mut().expect("there is one").push(letter),
            }
        }
        words
    }

    #[test]
    fn the_parser_accepts_each_example_whether_all_is_defined_or_its_command_alone() {
        let examples = EXAMPLES.iter().flat_map(|(_, examples)| *examples);
        for line in examples.flat_map(|example| example.line.split(" && ")) {
            // The part for the shell (a pipe or redirection) is no argument.
            let line = [" | ", " < ", " > "]
                .iter()
                .fold(line, |line, end| line.split(end).next().unwrap_or_default());
            let parsed = crate::command().try_get_matches_from(words(line));
            let alone = crate::Arguments::command().try_get_matches_from(words(line));
            match (parsed, alone) {
                (Ok(_), Ok(_)) => {}
                (Ok(_), Err(error)) => panic!("{line}: only with all defined: {error}"),
                (Err(error), _) => assert!(!error.use_stderr(), "{line}: {error}"),
            }
        }
    }
}
