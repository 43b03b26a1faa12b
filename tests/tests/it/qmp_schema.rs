//! `query-qmp-schema`: each entity is a subset of the one that QEMU's own storage daemon reports.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use blockhouse_tests::{blockhouse, need, require, tool};
use serde_json::Value;

/// Entities by name.
struct Schema(BTreeMap<String, Value>);

impl Schema {
    /// The schema of a program.
    fn of(mut program: Command) -> Self {
        let mut child = program
            .args(["--chardev", "stdio,id=c", "--monitor", "c"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it is there");
        let mut input = child.stdin.take().expect("a pipe");
        let lines = "{'execute':'qmp_capabilities'}{'execute':'query-qmp-schema'}";
        input.write_all(lines.as_bytes()).expect("it reads");
        let output = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let mut answers = output.map(|line| {
            serde_json::from_str::<Value>(&line.expect("text")).expect("JSON")["return"].take()
        });
        let schema = answers.find(Value::is_array).expect("a schema");
        // QEMU drops the rest of a long answer at `quit` if its reader is slow.
        input.write_all(b"{'execute':'quit'}").expect("it reads");
        answers.for_each(drop);
        assert!(child.wait().expect("a child").success());
        let entities = schema.as_array().into_iter().flatten().cloned();
        Self(entities.map(|entity| (text_of(&entity, "name").to_owned(), entity)).collect())
    }

    fn of_kind(&self, kind: &str) -> BTreeSet<&str> {
        let entities = self.0.iter().filter(|(_, entity)| entity["meta-type"] == kind);
        entities.map(|(name, _)| name.as_str()).collect()
    }
}

fn text_of<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

fn list_of<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map(Vec::as_slice).unwrap_or_default()
}

/// Compares types of both schemas, each pair once.
struct Comparison<'a> {
    ours: &'a Schema,
    theirs: &'a Schema,
    seen: BTreeSet<(String, String)>,
}

impl Comparison<'_> {
    /// Asserts that a type is a subset of QEMU's. With `is_given`, for values from clients, it must
    /// have every member that QEMU requires.
    fn compare(&mut self, ours: &str, theirs: &str, is_given: bool, path: &str) {
        if !self.seen.insert((ours.to_owned(), theirs.to_owned())) {
            return;
        }
        let (own, other) = (self.ours.0[ours].clone(), self.theirs.0[theirs].clone());
        let kind = text_of(&own, "meta-type");
        assert_eq!(kind, text_of(&other, "meta-type"), "{path}");
        match kind {
            "builtin" => assert_eq!(own["json-type"], other["json-type"], "{path}"),
            "enum" => {
                let words = |one: &Value| -> BTreeSet<String> {
                    list_of(one, "members")
                        .iter()
                        .map(|word| text_of(word, "name").to_owned())
                        .collect()
                };
                assert!(words(&own).is_subset(&words(&other)), "{path}: {own}");
            }
            "array" => {
                let [ours, theirs] = [&own, &other].map(|one| text_of(one, "element-type"));
                self.compare(ours, theirs, is_given, path);
            }
            "alternate" => {
                for own in list_of(&own, "members") {
                    let own = text_of(own, "type");
                    let form = |schema: &Schema, name: &str| {
                        let entity = &schema.0[name];
                        [entity["meta-type"].clone(), entity["json-type"].clone()]
                    };
                    let others = list_of(&other, "members").iter();
                    let mut others = others.map(|other| text_of(other, "type"));
                    let wanted = form(self.ours, own);
                    let other = others.find(|other| form(self.theirs, other) == wanted);
                    self.compare(own, other.expect(path), is_given, path);
                }
            }
            _ => self.compare_objects(&own, &other, is_given, path),
        }
    }

    fn compare_objects(&mut self, ours: &Value, theirs: &Value, is_given: bool, path: &str) {
        let is_needed = |member: &Value| member.get("default").is_none();
        for member in list_of(ours, "members") {
            let name = text_of(member, "name");
            let path = format!("{path}.{name}");
            let mut others = list_of(theirs, "members").iter();
            let other = others.find(|other| other["name"] == name).expect(&path);
            // In a result, a member that we always give may be optional in QEMU; in arguments, our
            // optional member must be optional in QEMU.
            assert!(!is_given || is_needed(member) == is_needed(other), "{path}");
            assert!(is_given || !is_needed(other) || is_needed(member), "{path}");
            self.compare(text_of(member, "type"), text_of(other, "type"), is_given, &path);
        }
        for other in list_of(theirs, "members").iter().filter(|other| is_needed(other)) {
            let mut members = list_of(ours, "members").iter();
            assert!(members.any(|member| member["name"] == other["name"]), "{path}: {other}");
        }
        assert!(ours.get("tag").is_none() || ours["tag"] == theirs["tag"], "{path}");
        for variant in list_of(ours, "variants") {
            let path = format!("{path}.{}", text_of(variant, "case"));
            let mut others = list_of(theirs, "variants").iter();
            let other = others.find(|other| other["case"] == variant["case"]).expect(&path);
            self.compare(text_of(variant, "type"), text_of(other, "type"), is_given, &path);
        }
    }
}

#[test]
fn the_schema_is_a_part_of_qemus() {
    require!(need::tools(&["qemu-storage-daemon"]));
    let mut program = Command::new(blockhouse());
    program.arg("qemu-storage-daemon");
    let (ours, theirs) = (Schema::of(program), Schema::of(tool("qemu-storage-daemon")));
    let mut comparison = Comparison { ours: &ours, theirs: &theirs, seen: BTreeSet::new() };
    for (kind, least) in [("command", 45), ("event", 5)] {
        let names = ours.of_kind(kind);
        assert!(names.len() >= least, "{names:?}");
        for name in names {
            let (own, other) = (&ours.0[name], theirs.0.get(name).expect(name));
            let [own_type, other_type] = [own, other].map(|one| text_of(one, "arg-type"));
            comparison.compare(own_type, other_type, kind == "command", name);
            if kind == "command" {
                let [own_type, other_type] = [own, other].map(|one| text_of(one, "ret-type"));
                comparison.compare(own_type, other_type, false, &format!("{name} ->"));
            }
        }
    }
}
