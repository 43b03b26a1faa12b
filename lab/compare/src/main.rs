//! `cargo xtask compare`: measures Blockhouse and its peers on this machine.
//!
//! In each round every server is started, loaded and stopped in turn (A B C A B C ...), so that a
//! drift of the machine's speed affects all; or all servers of a row are started once and loaded in
//! turn. Figures are medians over the rounds with their spread; ratios are taken within a round.
//! All servers get the same prefilled image in the same place, and ours is compared only with
//! servers that treat the page cache as it does.
//!
//! - [`raw`], [`rows`]: the comparison of raw images, and the loads
//! - [`qcow2`]: the comparison of qcow2 images: other loads, and tools
//! - [`backup`]: the rate with bitmaps and backups
//! - [`mirror`]: the rate during a mirror, and the duration of its switch
//! - [`forks`]: for how long a guest waits while its disk is forked
//! - [`growth`]: figures while something grows
//! - [`vmstate`]: saving and loading a machine's state
//! - [`tls`]: reads over TLS
//! - [`cloud_images`]: images of clouds' shapes, converted
//! - [`remote`]: storage on another server
//! - [`start`]: the time until a server is ready, with its sandbox and without
//! - [`plain_server`]: a minimal server in C, as a limit
//! - [`servers`], [`storage`]: the servers, and where their images are
//! - [`light`], [`fio`], [`vhost_user`], [`guest`]: the clients
//! - [`report`]: rates, ratios and their output
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "it talks to the person who started it")]

mod backup;
mod caching;
mod cloud_images;
mod config;
mod fio;
mod forks;
mod gaps;
mod growth;
mod guest;
mod interrupt;
mod light;
mod measurement;
mod mirror;
mod plain_server;
mod qcow2;
mod raw;
mod remote;
mod report;
mod results;
mod rows;
mod servers;
mod start;
mod storage;
mod tls;
mod vhost_user;
mod vmstate;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use lab_tools::apt;
use lab_tools::workspace::Workspace;

use self::config::Options;
use self::light::null_server;
use self::servers::Format;

/// Compare the speed of Blockhouse with its peers, or with another build of itself.
#[derive(Parser)]
#[command(bin_name = "cargo xtask compare", version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    server: Option<Hidden>,
}

#[derive(Subcommand)]
enum Hidden {
    /// Serve nothing, as fast as the light client can ask: that client's own limit
    #[command(hide = true)]
    NullServer {
        /// Unix socket to listen on
        socket: PathBuf,
        /// Bytes in the export
        size: u64,
    },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match &cli.server {
        Some(Hidden::NullServer { socket, size }) => null_server::serve(socket, *size),
        None => compare(&cli.options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("compare: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn compare(options: &Options) -> Result<()> {
    let workspace = Workspace::find()?;
    if options.vmstate {
        return vmstate::run(&workspace, options);
    }
    if options.start {
        return start::run(&workspace, options);
    }
    if options.tls {
        return tls::run(&workspace, options);
    }
    if let Some(given) = &options.remote {
        return remote::run(&workspace, options, given);
    }
    apt::require(apt::FOR_COMPARISON)?;
    if options.images {
        return cloud_images::run(&workspace, options);
    }
    if options.backup {
        return backup::run(&workspace, options);
    }
    if options.gaps {
        return gaps::run(&workspace, options);
    }
    if options.mirror {
        return mirror::run(&workspace, options);
    }
    if options.forks {
        return forks::run(&workspace, options);
    }
    if options.growth {
        return growth::run(&workspace, options);
    }
    match options.format {
        Format::Raw => raw::run(&workspace, options),
        Format::Qcow2 => qcow2::run(&workspace, options),
    }
}
