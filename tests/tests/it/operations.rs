//! docs/operations.md: its commands work, and the messages that it explains exist.

use std::path::{Path, PathBuf};
use std::process::Command;

use blockhouse_tests::{
    Scratch, Serve, copy_blockhouse,
    image_tool::{command, new_image, str},
    need, require, run, tool,
    typed::{Folder, Serving, commands},
};

const PAGE: &str = include_str!("../../../docs/operations.md");

/// The page's code blocks of a language.
fn blocks(language: &str) -> Vec<&'static str> {
    let start = format!("```{language}\n");
    let blocks = PAGE.split(&start).skip(1);
    blocks.map(|rest| rest.split("```").next().unwrap_or_default()).collect()
}

/// The text of the production code, with multi-line strings joined.
fn code(folder: &Path, text: &mut String) {
    for entry in std::fs::read_dir(folder).expect("a folder of sources") {
        let path: PathBuf = entry.expect("a file").path();
        if path.is_dir() {
            code(&path, text);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let mut rest = &*std::fs::read_to_string(&path).expect("a source");
            while let Some((line, after)) = rest.split_once("\\\n") {
                text.push_str(line);
                rest = after.trim_start();
            }
            text.push_str(rest);
        }
    }
}

#[test]
fn the_messages_that_are_explained_exist() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    let mut text = String::new();
    for entry in std::fs::read_dir(crates).expect("the crates") {
        code(&entry.expect("a crate").path().join("src"), &mut text);
    }
    let table = PAGE.split("## Messages").nth(1).expect("the section");
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `"));
    let messages: Vec<_> = rows.filter_map(|row| row.split('`').next()).collect();
    assert!(messages.len() > 15, "{messages:?}");
    for message in messages {
        assert!(text.contains(message), "no message of the program has: {message}");
    }
}

#[test]
fn each_key_of_a_configuration_is_in_a_table() {
    let scratch = Scratch::new();
    let file = scratch.path("disks.toml");
    let tables = PAGE.split("## Many disks").nth(1).expect("the section");
    let rows: String = tables.lines().filter(|line| line.starts_with("| `")).collect();
    for table in ["[server]", "[[disk]]\npath = \"/a\""] {
        std::fs::write(&file, format!("{table}\nno-such-key = 1\n")).expect("room");
        let refused = command(&["serve", "--config", str(&file)]).failure("expected one of");
        let keys = refused.stderr.split("expected one of").nth(1).expect("the keys");
        let keys: Vec<_> = keys.split('`').skip(1).step_by(2).collect();
        assert!(keys.len() > 10, "{keys:?}");
        for key in keys {
            assert!(rows.contains(&format!("`{key}`")), "{table}: no table has {key}");
        }
    }
}

#[test]
fn the_machines_start_with_the_disk() {
    require!(need::tools(&["qemu-system-x86_64"]));
    let folder = Folder::new();
    folder.run("blockhouse create disk.img 64M");
    let lines = commands(PAGE, "qemu-system-x86_64 ");
    assert_eq!(lines.len(), 2);
    for line in lines {
        let server = if line.contains("vhost-user") {
            "blockhouse serve disk.img --vhost-user-blk disk.vu"
        } else {
            "blockhouse serve disk.img --nbd 'nbd+unix:///?socket=disk.sock'"
        };
        let serving = Serving::start(&folder, server);
        let script = format!(
            "printf 'info qtree\\nquit\\n' | {line} -accel tcg -display none -S -monitor stdio"
        );
        let mut shell = folder.shell("sh -c \"$SCRIPT\"");
        let outcome = run(shell.env("SCRIPT", script)).success();
        assert_eq!(outcome.stderr, "", "{line}");
        assert!(
            outcome.stdout.contains("dev: v") && outcome.stdout.contains("-blk"),
            "{}",
            outcome.stdout
        );
        serving.stop();
    }
}

#[test]
fn libvirt_accepts_its_elements() {
    require!(need::tools(&["virt-xml-validate", "xmllint"]));
    let scratch = Scratch::new();
    let blocks = blocks("xml");
    let [network, memory, vhost_user] = blocks[..] else { panic!("three elements: {blocks:?}") };
    for (name, memory, disk) in [("network", "", network), ("vhost-user", memory, vhost_user)] {
        let domain = format!(
            "<domain type='kvm'><name>vm</name><memory unit='GiB'>1</memory>{memory}<vcpu>2</vcpu>\
             <os><type arch='x86_64' machine='q35'>hvm</type></os><devices>{disk}</devices></domain>"
        );
        let file = scratch.path(name);
        std::fs::write(&file, &domain).expect("room");
        run(tool("virt-xml-validate").arg(&file).arg("domain")).success();
        // The validator also rejects a wrong file.
        std::fs::write(&file, domain.replace("<target", "<aim")).expect("room");
        run(tool("virt-xml-validate").arg(&file).arg("domain")).failure("fails to validate");
    }
}

/// The arguments of the server in the pod, and the user of its security context.
fn pod(scratch: &Scratch) -> (Vec<String>, u64) {
    let file = scratch.path("pod.yaml");
    std::fs::write(&file, blocks("yaml")[0]).expect("room");
    let script = "import json, sys, yaml; print(json.dumps(yaml.safe_load(open(sys.argv[1]))))";
    let outcome = run(Command::new("/usr/bin/python3").args(["-c", script]).arg(&file)).success();
    let pod: serde_json::Value = serde_json::from_str(&outcome.stdout).expect("JSON");
    let server = &pod["spec"]["initContainers"][0];
    let words = server["args"].as_array().expect("words").iter();
    let words = words.map(|word| word.as_str().expect("a word").to_owned()).collect();
    (words, server["securityContext"]["runAsUser"].as_u64().expect("a user"))
}

#[test]
fn the_server_of_the_pod_serves_with_its_rights() {
    require!(need::root());
    require!(need::tools(&["setpriv", "chown", "qemu-img"]));
    require!(need::python_module("yaml"));
    // In memory, because every user may enter the folders above.
    let scratch = Scratch::in_memory();
    let (words, user) = pod(&scratch);
    assert_eq!(words[0], "serve");
    let image = new_image(&scratch, "disk.qcow2", "64M");
    let binary = scratch.path("blockhouse");
    copy_blockhouse(&binary);
    // The effect of fsGroup in Kubernetes: a folder that the group may write to.
    let shared = scratch.path("memory");
    std::fs::create_dir(&shared).expect("a folder");
    run(tool("chown").arg(format!("0:{user}")).arg(&shared)).success();
    run(tool("chmod").arg("2770").arg(&shared)).success();
    run(tool("chown").arg(format!("{user}:{user}")).arg(&image)).success();
    let path = |word: &String| {
        word.replace("/images/disk.qcow2", str(&image)).replace("/memory", str(&shared))
    };
    let words: Vec<_> = words.iter().skip(1).map(path).collect();
    let uri = words.iter().find_map(|word| word.strip_prefix("--nbd=")).expect("a URI").to_owned();
    let rights =
        [format!("--reuid={user}"), format!("--regid={user}"), "--clear-groups".to_owned()];
    let rights = rights.each_ref().map(String::as_str);
    let rights =
        rights.into_iter().chain(["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]);
    let mut serve = Serve::bare(&scratch, Path::new(&words[0])).binary(&binary);
    serve = serve.under(["setpriv"].into_iter().chain(rights).chain(["--"]));
    for word in &words[1..] {
        serve = serve.flag(word);
    }
    let server = serve.start();
    let info = run(tool("qemu-img").args(["info", "--output=json", &uri])).success();
    assert!(info.stdout.contains("67108864"), "{}", info.stdout);
    assert!(shared.join("state").is_dir());
    server.stop();
}
