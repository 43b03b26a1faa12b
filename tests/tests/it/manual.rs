//! The output of `blockhouse __generate` for packages: man pages, completions, the option
//! reference.

use std::path::{Path, PathBuf};
use std::process::Command;

use blockhouse_tests::generated::{control_schema, options};
use blockhouse_tests::{
    Scratch, blockhouse,
    image_tool::{command, str},
    need, require, run, tool,
};
use serde_json::Value;

fn generated(scratch: &Scratch) -> PathBuf {
    let folder = scratch.path("generated");
    std::fs::create_dir(&folder).expect("a folder");
    command(&["__generate", str(&folder)]).success();
    folder
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn the_option_reference_has_all_that_help_shows() {
    for section in options().split("\n## ").skip(1) {
        let words = section.lines().next().expect("a title").split(' ').skip(1);
        let mut help = Command::new(blockhouse());
        let help = run(help.args(words).arg("--help")).success().stdout;
        let first_words = help.lines().filter_map(|line| line.split_whitespace().next());
        for option in first_words.filter(|word| word.starts_with("--")) {
            let is_everywhere = ["--help", "--version", "--verbose", "--quiet"].contains(&option);
            assert!(is_everywhere || section.contains(option), "{option} in {section}");
        }
    }
}

#[test]
fn the_schema_of_the_control_socket_refers_to_nothing_that_it_lacks() {
    let schema = control_schema();
    for (name, method) in schema["methods"].as_object().expect("methods") {
        assert!(method["params"].is_object() && !method["result"].is_null(), "{name}");
    }
    let mut rest = vec![schema];
    while let Some(value) = rest.pop() {
        match value {
            Value::Object(object) => rest.extend(object.values()),
            Value::Array(list) => rest.extend(list),
            _ => {}
        }
        if let Some(reference) = value.get("$ref").and_then(Value::as_str) {
            let pointer = reference.strip_prefix('#').expect("a place in the schema");
            assert!(schema.pointer(pointer).is_some(), "{reference}");
        }
    }
}

#[test]
fn every_command_has_a_man_page_that_formatters_accept() {
    require!(need::tools(&["man", "mandoc"]));
    let scratch = Scratch::new();
    let pages = generated(&scratch).join("man");
    for section in options().split("\n## ").skip(1) {
        let name = section.lines().next().expect("a title").replace(' ', "-");
        let path = pages.join(format!("{name}.1"));
        // Only errors count: mandoc's warnings are about breaks between paragraphs and a missing
        // date.
        let linted = run(tool("mandoc").args(["-Tlint", "-W", "error"]).arg(&path)).success();
        assert_eq!(linted.stdout, "", "{name}");
        let mut man = tool("man");
        man.args(["--warnings", "--local-file"])
            .arg(&path)
            .env("MANWIDTH", "80")
            .env("LC_ALL", "C.UTF-8");
        let shown = run(&mut man).success();
        assert_eq!(shown.stderr, "", "{name}: {}", shown.describe("no warnings"));
        for title in ["NAME", "SYNOPSIS", "OPTIONS", "EXIT STATUS", "EXAMPLES", "SEE ALSO"] {
            assert!(shown.stdout.lines().any(|line| line == title), "{name}: no {title}");
        }
    }
    let serve = read(&pages.join("blockhouse-serve.1"));
    assert!(serve.contains("vhost") && !serve.contains("hand\\-over"), "hidden options are shown");
}

/// The completions that bash offers for the last word.
fn bash_completes(script: &Path, words: &[&str]) -> Vec<String> {
    let list = words.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" ");
    let last = words.len() - 1;
    let code = format!(
        "source '{}'; COMP_WORDS=({list}); COMP_CWORD={last}; \
         _blockhouse blockhouse '{}' '{}'; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        str(script),
        words[last],
        words[last - 1],
    );
    let outcome = run(Command::new("bash").args(["--norc", "-c", &code])).success();
    outcome.stdout.lines().map(str::to_owned).collect()
}

#[test]
fn bash_completes_commands_and_options() {
    require!(need::tools(&["bash"]));
    let scratch = Scratch::new();
    let script = generated(&scratch).join("completions/blockhouse.bash");
    assert_eq!(bash_completes(&script, &["blockhouse", "se"]), ["serve"]);
    assert_eq!(bash_completes(&script, &["blockhouse", "snapshot", "re"]), ["rename"]);
    let found = bash_completes(&script, &["blockhouse", "serve", "--de"]);
    assert_eq!(found, ["--detect-zeroes"]);
    assert_eq!(bash_completes(&script, &["blockhouse", "check", "--repair", "l"]), ["leaks"]);
    assert_eq!(bash_completes(&script, &["blockhouse", "serve", "--hand"]), [""]);
}

#[test]
fn bash_completes_values_that_the_option_takes() {
    require!(need::tools(&["bash"]));
    let scratch = Scratch::new();
    let script = generated(&scratch).join("completions/blockhouse.bash");
    let formats = ["raw", "qcow2", "luks", "vmdk", "vdi", "vpc", "vhdx"];
    for (words, expected) in [
        (&["serve", "--cache", "w"][..], &["writeback", "writethrough"][..]),
        (&["serve", "--engine", ""], &["auto", "io_uring", "linux-aio", "threads"]),
        (&["serve", "--tls", "o"], &["off", "optional"]),
        (&["serve", "--sandbox", ""], &["on", "off"]),
        (&["info", "-f", ""], &formats),
        (&["resize", "--preallocation", "f"], &["falloc", "full"]),
        // No file names are offered if the value is not a path.
        (&["serve", "--workers", ""], &[""]),
        (&["serve", "--create", ""], &[""]),
        (&["serve", "--nbd", ""], &[""]),
        // Neither are users or groups of this host.
        (&["serve", "--user", ""], &[""]),
        (&["serve", "--socket-group", ""], &[""]),
    ] {
        let words: Vec<_> = ["blockhouse"].iter().chain(words).copied().collect();
        assert_eq!(bash_completes(&script, &words), expected, "{words:?}");
    }
    // File names are offered if the value is a path.
    let here = bash_completes(&script, &["blockhouse", "serve", "--pid-file", "/etc/pass"]);
    assert!(here.contains(&"/etc/passwd".to_owned()), "{here:?}");
}

#[test]
fn fish_completes_commands_and_options() {
    require!(need::tools(&["fish"]));
    let scratch = Scratch::new();
    let script = generated(&scratch).join("completions/blockhouse.fish");
    let home = scratch.path("home");
    let complete = |line: &str| {
        let code = format!("source '{}'; complete -C '{line}'", str(&script));
        let mut fish = tool("fish");
        fish.args(["--no-config", "-c", &code]).env("HOME", &home).env("XDG_CONFIG_HOME", &home);
        let outcome = run(&mut fish).success();
        let words = outcome.stdout.lines().filter_map(|line| line.split('\t').next());
        words.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(complete("blockhouse ser"), ["serve"]);
    // Fish also offers options that have these letters with others between them.
    assert_eq!(complete("blockhouse serve --detect-z"), ["--detect-zeroes"]);
    assert_eq!(complete("blockhouse serve --hand"), [""; 0]);
}

#[test]
fn zsh_completes_commands_and_options() {
    require!(need::tools(&["zsh"]));
    let scratch = Scratch::new();
    let folder = generated(&scratch).join("completions");
    // The completion of zsh needs a terminal, so the line is typed to another shell. That shell
    // handles keys only after its prompt.
    let code = format!(
        "zmodload zsh/zpty; zpty shell zsh -f -i; \
         typed() {{ zpty -w shell \"$1\"; }}; \
         typed 'PROMPT=at-its-prompt; fpath=({0} $fpath); autoload -U compinit; compinit -u -d {0}/dump; print ready-{1}'; \
         zpty -r shell out '*ready-{1}*ready-{1}*at-its-prompt*'; \
         zpty -n -w shell $'blockhouse serve --detec\\t'; \
         zpty -r shell out '*--detect-zeroes*' && print found",
        str(&folder),
        "for-words",
    );
    let outcome = run(tool("zsh").args(["-f", "-c", &code]).env("TERM", "dumb"));
    assert!(outcome.stdout.contains("found"), "{}", outcome.describe("must complete"));
}

#[test]
fn an_option_is_no_folder() {
    let scratch = Scratch::new();
    for option in ["--help", "-h", "--verbose"] {
        let mut generate = Command::new(blockhouse());
        let outcome = run(generate.current_dir(scratch.path(".")).args(["__generate", option]));
        assert_eq!(outcome.status.code(), Some(2), "{}", outcome.describe("wrong usage"));
        assert!(!scratch.path(option).exists());
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_one_line() {
    let outcome = command(&["__generate", "/proc/nowhere"]).failure("cannot make the folder");
    assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
}
