//! Groups the options of `serve` for its help, its man page and its completions.
//!
//! Invariant, which a test checks: each option that help shows is in one group. The first group has
//! the options that most servers need, and no heading.

use clap::{Arg, Command};

/// The options that most servers need.
const FIRST: [&str; 10] = [
    "nbd",
    "socket",
    "vhost_user_blk",
    "ublk",
    "format",
    "read_only",
    "create",
    "cache",
    "control",
    "fork",
];

/// The other groups: their headings, and the names of their options.
const GROUPS: [(&str, &[&str]); 6] = [
    (
        "NBD clients",
        &["name", "limits", "bitmap", "tls", "tls_certificates", "tls_psk", "tls_allow"],
    ),
    (
        "Disks",
        &[
            "image_opts",
            "snapshot",
            "logical_block_size",
            "physical_block_size",
            "discard_granularity",
            "discard",
            "detect_zeroes",
            "copy_on_read",
            "prefetch",
            "bitmaps_in",
            "trust_bitmaps",
            "on_full",
            "hold_seconds",
            "threshold",
            "state",
        ],
    ),
    (
        "Names in images, and keys",
        &["allow_path", "allow_remote", "no_references", "key_file", "passphrase_file"],
    ),
    (
        "The server",
        &[
            "config",
            "metrics",
            "pid_file",
            "socket_mode",
            "socket_group",
            "user",
            "group",
            "sandbox",
            "sandbox_allow",
            "upgrade_to",
            "qmp",
        ],
    ),
    ("Speed", &["engine", "workers", "queues", "poll_max_us", "register_memory"]),
    ("Experimental", &["fixed_files", "io_poll"]),
];

/// The definition of the command line, with the options of `serve` in groups.
pub fn apply(command: Command) -> Command {
    command.mut_subcommand("serve", |serve| serve.mut_args(in_its_group))
}

fn in_its_group(argument: Arg) -> Arg {
    let name = argument.get_id().as_str();
    if let Some(place) = FIRST.iter().position(|first| *first == name) {
        return argument.display_order(place);
    }
    let group = GROUPS.iter().find_map(|(heading, names)| {
        let place = names.iter().position(|one| *one == name)?;
        Some((*heading, place))
    });
    match group {
        Some((heading, place)) => argument.help_heading(heading).display_order(place),
        None => argument,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_option_that_is_shown_is_in_one_group() {
        let command = crate::command();
        let serve = command.find_subcommand("serve").expect("the command");
        let options = serve.get_opts().filter(|option| !option.is_hide_set());
        let mut shown: Vec<_> = options.map(|option| option.get_id().as_str()).collect();
        let mut grouped: Vec<_> = FIRST.to_vec();
        grouped.extend(GROUPS.iter().flat_map(|(_, names)| *names));
        shown.sort_unstable();
        grouped.sort_unstable();
        assert_eq!(shown, grouped);
    }
}
