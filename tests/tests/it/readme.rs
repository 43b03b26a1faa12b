//! README.md: the commands of everyday use, as they are typed, one after the other in an empty folder.

use blockhouse_tests::typed::{Folder, Serving, commands};

const README: &str = include_str!("../../../README.md");

#[test]
fn every_command_of_the_readme_works_as_typed() {
    let folder = Folder::new();
    let commands = commands(README, "blockhouse ");
    assert!(commands.len() > 15, "{commands:?}");
    let mut serving: Option<Serving> = None;
    for line in commands {
        // A client of the control socket needs the server of the line before.
        if !line.starts_with("blockhouse snapshot create --control") {
            serving.take().into_iter().for_each(Serving::stop);
        }
        if line.starts_with("blockhouse serve") {
            serving = Some(Serving::start(&folder, line));
        } else {
            folder.run(line);
        }
    }
    assert!(folder.path("report.html").exists());
}
