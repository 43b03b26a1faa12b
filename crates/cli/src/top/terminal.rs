//! The terminal that shows a live view, on a screen of its own.

use std::io::{self, Write};
use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};

use crossterm::cursor::{Hide, Show};
use crossterm::terminal::{self, Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen};
use crossterm::{execute, queue};

use super::canvas::Canvas;

/// The state of the terminal: true until it is restored.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);

/// The terminal. Its screen, its cursor and its mode are restored when this value is dropped, and
/// before the message of a panic.
pub struct Terminal {
    shown: Canvas,
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
        IS_TAKEN.store(true, Ordering::SeqCst);
        let taken = Self { shown: Canvas::new(0, 0) };
        execute!(io::stdout(), EnterAlternateScreen, Hide)?;
        Ok(taken)
    }

    /// Shows what `draw` draws on a canvas of the terminal's size.
    pub fn show(&mut self, draw: impl FnOnce(&mut Canvas)) -> io::Result<()> {
        let (width, height) = terminal::size()?;
        let empty = Canvas::new(width.into(), height.into());
        let mut frame = Vec::new();
        if self.shown.area() != empty.area() {
            queue!(frame, Clear(ClearType::All))?;
            self.shown = empty.clone();
        }
        let mut canvas = empty;
        draw(&mut canvas);
        canvas.show(&self.shown, &mut frame)?;
        self.shown = canvas;
        let mut out = io::stdout();
        out.write_all(&frame)?;
        out.flush()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        restore();
    }
}

/// Restores the terminal, once. Errors are ignored: the terminal may be gone.
fn restore() {
    if IS_TAKEN.swap(false, Ordering::SeqCst) {
        _ = terminal::disable_raw_mode();
        _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
    }
}
