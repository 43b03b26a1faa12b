//! A client's connection: the greeting, the negotiation, commands one after the other, and events
//! between them.

use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use blockhouse_core::{Buffer, IoVectorList};
use blockhouse_daemon::control::LineWriter;
use blockhouse_engine::{Stream, sleep, timeout};
use futures_channel::mpsc;
use futures_util::future::{Either, FutureExt, pending, select};
use futures_util::stream::{StreamExt, unfold};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};
use serde_json::{Map, Value, json};

use super::arguments::Arguments;
use super::commands::{self, Command};
use super::context::Context;
use super::errors::{QmpError, Returned};
use super::events::catch_up;
use super::query::version;
use super::reader::{Message, Reader};

/// Bytes that one system call receives.
const RECEIVE_SIZE: usize = 4096;
/// Maximum time for a client to receive a reply and the events before it.
const REPLY_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum time for a client to receive it after the end of the server has begun.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// A client.
#[derive(Default)]
struct Client {
    /// The events, once it has negotiated capabilities.
    events: Option<mpsc::Receiver<Value>>,
}

/// The messages of a client.
struct Messages {
    stream: Stream,
    received: Buffer,
    /// Bytes of `received` that were not read yet.
    unread: std::ops::Range<usize>,
    reader: Reader,
}

impl Messages {
    /// The next message; `None` when the client has closed the connection, or after a message past
    /// the limits. The future must not be dropped before it completes, because received bytes would
    /// be lost.
    async fn next(&mut self) -> io::Result<Option<Message>> {
        loop {
            if let Some(message) = self.reader.next() {
                return Ok(Some(message));
            }
            if self.unread.is_empty() {
                let mut list = IoVectorList::new();
                list.push(self.received.lend());
                let (count, list) = self.stream.receive(list).await;
                // The list borrows the receive buffer until this point.
                drop(list);
                match count? {
                    0 => return Ok(None),
                    count => self.unread = 0..count,
                }
            }
            if self.reader.is_over() {
                return Ok(None);
            }
            self.unread.start += self.reader.take(&self.received.bytes()[self.unread.clone()]);
        }
    }
}

impl Client {
    /// Waits for the next event, before the negotiation forever. `None`: the client was too slow or
    /// events were lost, so the session ends.
    async fn next_event(&mut self) -> Option<Value> {
        match &mut self.events {
            Some(events) => events.next().await,
            None => pending().await,
        }
    }

    /// The next queued event, if there is one.
    fn waiting_event(&mut self) -> Option<Value> {
        self.events.as_mut()?.try_recv().ok()
    }
}

/// Serves one client until the client or the server ends.
pub(super) async fn serve_client(context: Rc<Context>, stream: Stream) {
    let writer = LineWriter::new(stream.clone());
    // An error means that the client has disconnected or does not read.
    let _ = converse(&context, &writer, stream).await;
}

async fn converse(context: &Rc<Context>, writer: &LineWriter, stream: Stream) -> io::Result<()> {
    let received = Buffer::try_new(RECEIVE_SIZE).map_err(|_| io::ErrorKind::OutOfMemory)?;
    let messages = Messages { stream, received, unread: 0..0, reader: Reader::default() };
    let messages = unfold(messages, |mut all| async move { Some((all.next().await, all)) });
    let mut messages = pin!(messages.fuse());
    let mut stopped = context.stopped.clone().fuse();
    let mut client = Client::default();
    send(writer, &json!({ "QMP": { "version": version(), "capabilities": [] } })).await?;
    loop {
        let message = futures_util::select_biased! {
            _ = stopped => return Ok(()),
            event = client.next_event().fuse() => match event {
                Some(event) => {
                    unless_ended(context, send(writer, &event)).await?;
                    continue;
                }
                None => return Ok(()),
            },
            message = messages.select_next_some() => match message? {
                Some(message) => message,
                None => return Ok(()),
            },
        };
        let answer = answer(context, writer, &mut client, message).await?;
        catch_up(context);
        let sending = async {
            while let Some(event) = client.waiting_event() {
                send(writer, &event).await?;
            }
            send(writer, &answer).await
        };
        // The limit of one line would let a slow client delay the end of the server for hours.
        let sending = timeout(REPLY_TIMEOUT, unless_ended(context, sending));
        sending.await.ok_or(io::ErrorKind::TimedOut)??;
    }
}

/// Waits for `sending`, at the end of the server for [`END_TIMEOUT`] only.
async fn unless_ended(
    context: &Context,
    sending: impl Future<Output = io::Result<()>>,
) -> io::Result<()> {
    let ended = async {
        let _ = context.stopped.clone().await;
        sleep(END_TIMEOUT).await;
    };
    match select(pin!(sending), pin!(ended)).await {
        Either::Left((sent, _)) => sent,
        Either::Right(_) => Err(io::ErrorKind::TimedOut.into()),
    }
}

/// JSON with the spaces that QEMU writes, because some programs compare the text.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W>(&mut self, writer: &mut W, is_first: bool) -> io::Result<()>
    where
        W: ?Sized + io::Write,
    {
        if is_first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W>(&mut self, writer: &mut W, is_first: bool) -> io::Result<()>
    where
        W: ?Sized + io::Write,
    {
        if is_first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W>(&mut self, writer: &mut W) -> io::Result<()>
    where
        W: ?Sized + io::Write,
    {
        writer.write_all(b": ")
    }
}

/// An event with its members in QEMU's order.
#[derive(Serialize)]
struct Told<'a> {
    timestamp: Moment<'a>,
    event: &'a Value,
    data: &'a Value,
}

#[derive(Serialize)]
struct Moment<'a> {
    seconds: &'a Value,
    microseconds: &'a Value,
}

/// The message as an event; `None` if it is no event.
fn told(message: &Value) -> Option<Told<'_>> {
    let event = message.get("event")?;
    let (seconds, microseconds) =
        (&message["timestamp"]["seconds"], &message["timestamp"]["microseconds"]);
    let timestamp = Moment { seconds, microseconds };
    Some(Told { timestamp, event, data: &message["data"] })
}

async fn send(writer: &LineWriter, value: &Value) -> io::Result<()> {
    let mut text = Vec::new();
    let mut serializer = Serializer::with_formatter(&mut text, Spaced);
    match told(value) {
        Some(event) => event.serialize(&mut serializer),
        None => value.serialize(&mut serializer),
    }
    .expect("values are JSON");
    // QEMU ends lines with CR LF.
    text.push(b'\r');
    writer.send(&text).await
}

/// The reply to a message.
async fn answer(
    context: &Rc<Context>,
    writer: &LineWriter,
    client: &mut Client,
    message: Message,
) -> io::Result<Value> {
    let (id, request) = match message {
        Ok(Value::Object(mut object)) => (object.remove("id"), request(object)),
        Ok(_) => (None, Err(QmpError::generic("QMP input must be a JSON object"))),
        Err(why) => (None, Err(QmpError::generic(why))),
    };
    let returned = match request {
        Ok((name, arguments)) => execute(context, writer, client, &name, arguments).await?,
        Err(error) => Err(error),
    };
    let mut answer = match returned {
        Ok(value) => json!({ "return": value }),
        Err(error) => json!({ "error": error.to_json() }),
    };
    if let Some(id) = id {
        answer["id"] = id;
    }
    Ok(answer)
}

/// The command and the arguments in a request.
fn request(mut object: Map<String, Value>) -> Result<(String, Arguments), QmpError> {
    let command = object.remove("execute");
    let arguments = object.remove("arguments");
    let generic = |why: &str| Err(QmpError::generic(format!("QMP input {why}")));
    // This also rejects `exec-oob`: out-of-band execution is a capability that is not offered.
    if let Some(unknown) = object.keys().next() {
        return generic(&format!("member '{unknown}' is unexpected"));
    }
    match (command, arguments.unwrap_or_else(|| json!({}))) {
        (Some(Value::String(command)), Value::Object(given)) => {
            Ok((command, Arguments::new(given)))
        }
        (Some(Value::String(_)), _) => generic("member 'arguments' must be an object"),
        (Some(_), _) => generic("member 'execute' must be a string"),
        (None, _) => generic("lacks member 'execute'"),
    }
}

/// Executes a command, and sends events meanwhile.
async fn execute(
    context: &Rc<Context>,
    writer: &LineWriter,
    client: &mut Client,
    name: &str,
    arguments: Arguments,
) -> io::Result<Returned> {
    if name == commands::NEGOTIATION {
        return Ok(negotiate(context, client, arguments));
    }
    if client.events.is_none() {
        let why = "Expecting capabilities negotiation with 'qmp_capabilities'";
        return Ok(Err(QmpError::not_found(why)));
    }
    let Some(command) = commands::find(&context.answers, name) else {
        let why = format!("The command {name} has not been found");
        return Ok(Err(QmpError::not_found(why)));
    };
    let mut executing = pin!(pass(context, command, arguments).fuse());
    loop {
        // A command that has begun completes, also if its client is gone. Then the connection ends.
        let event = futures_util::select! {
            returned = executing => return Ok(returned),
            event = client.next_event().fuse() => match event {
                Some(event) => event,
                None => return Ok(executing.await),
            },
        };
        // The command goes on while the client receives the event, because it may hold claims and
        // the gate. The event is sent whole.
        let mut sending = pin!(unless_ended(context, send(writer, &event)).fuse());
        futures_util::select! {
            returned = executing => return sending.await.map(|()| returned),
            sent = sending => if let Err(error) = sent {
                executing.await.ok();
                return Err(error);
            },
        }
    }
}

/// Executes a command unless another process serves now.
async fn pass(context: &Rc<Context>, command: &Command, arguments: Arguments) -> Returned {
    let Some(_inside) = context.gate.enter().await else {
        return Err(QmpError::generic("another process serves now: connect again"));
    };
    // The state of QMP follows changes that clients of the control socket have made.
    catch_up(context);
    context.state.borrow_mut().commands += 1;
    let returned = (command.run)(context, arguments).await;
    let mut state = context.state.borrow_mut();
    state.commands -= 1;
    state.release_secrets();
    returned
}

fn negotiate(context: &Context, client: &mut Client, mut arguments: Arguments) -> Returned {
    if client.events.is_some() {
        let why = "Capabilities negotiation is already complete, command ignored";
        return Err(QmpError::not_found(why));
    }
    let wanted = arguments.some_list("enable")?.unwrap_or_default();
    arguments.end()?;
    if let Some(wanted) = wanted.first() {
        let wanted = wanted.as_str().unwrap_or_default();
        return Err(QmpError::generic(format!("Capability '{wanted}' is not available")));
    }
    client.events = Some(context.events.subscribe());
    Ok(json!({}))
}
