//! The terminal that shows a live view, on a screen of its own.

use std::io::{self, BufWriter, Stdout, Write};
use std::panic;

use crossterm::cursor::{Hide, Show};
use crossterm::execute;
use crossterm::terminal::{self, Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen};

use super::canvas::Canvas;

/// The terminal. Its screen, its cursor and its mode are restored when this value is dropped, and
/// before the message of a panic.
pub struct Terminal {
    out: BufWriter<Stdout>,
    /// The size of what it shows, in columns and lines.
    shown: (u16, u16),
}

impl Terminal {
    /// Takes the terminal of standard output.
    pub fn take() -> io::Result<Self> {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            restore();
            print(info);
        }));
        terminal::enable_raw_mode()?;
        let mut taken = Self { out: BufWriter::new(io::stdout()), shown: (0, 0) };
        execute!(taken.out, EnterAlternateScreen, Hide)?;
        Ok(taken)
    }

    /// Shows what `draw` draws on a canvas of the terminal's size.
    pub fn show(&mut self, draw: impl FnOnce(&mut Canvas)) -> io::Result<()> {
        let size = terminal::size()?;
        if self.shown != size {
            execute!(self.out, Clear(ClearType::All))?;
            self.shown = size;
        }
        let mut canvas = Canvas::new(size.0.into(), size.1.into());
        draw(&mut canvas);
        canvas.show(&mut self.out)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        restore();
    }
}

/// Restores the terminal. There is nobody to tell of errors: the terminal is gone.
fn restore() {
    _ = terminal::disable_raw_mode();
    let mut out = io::stdout();
    _ = execute!(out, LeaveAlternateScreen, Show);
    _ = out.flush();
}
