//! `blockhouse top`: the activity of a running server, live in the terminal.
//!
//! Reads the server's metrics repeatedly, and shows the differences: rates, and the latencies of
//! the requests of the last interval. Without a terminal, prints one table.

mod app;
mod canvas;
mod client;
mod model;
mod rates;
mod screen;
mod table;
mod terminal;

use std::io::{self, IsTerminal};
use std::time::Duration;

use anyhow::{Context, Result};
use app::{App, Next};
use client::Source;
use crossterm::event;
use model::Snapshot;
use rates::rows;
use terminal::Terminal;

use crate::output;

/// Arguments of `top`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The server: its --metrics address (127.0.0.1:PORT or the path of a Unix socket), or its
    /// --control socket.
    #[arg(value_name = "SOCKET|ADDRESS")]
    server: Source,
    /// Seconds between two readings.
    #[arg(long, short, value_name = "SECONDS", default_value = "1", value_parser = parse_interval)]
    interval: Duration,
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "use a number of seconds".to_owned())?;
    if (0.1..=3600.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("use 0.1 to 3600 seconds".into())
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    let Arguments { server, interval } = arguments;
    let first = server.read()?;
    if io::stdout().is_terminal() && io::stdin().is_terminal() {
        run_live(server, *interval, first)
    } else {
        std::thread::sleep(*interval);
        let second = server.read()?;
        output::print(&table::as_text(&rows(&first, &second)))
    }
}

/// Shows the server until a key ends it.
fn run_live(server: &Source, interval: Duration, first: Snapshot) -> Result<()> {
    let mut terminal = Terminal::take().context("cannot use the terminal")?;
    let mut app = App::new(server.to_string(), interval, first);
    loop {
        terminal.show(|canvas| screen::draw(canvas, &app)).context("cannot draw")?;
        if event::poll(app.time_to_reading()).context("cannot read the keyboard")? {
            let event = event::read().context("cannot read the keyboard")?;
            if app.handle(&event) == Next::Quit {
                return Ok(());
            }
        } else if app.is_due() {
            // A server that does not answer may answer again later, for example after an upgrade.
            app.take(server.read());
        }
    }
}
