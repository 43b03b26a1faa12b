//! The handshake phase: magic numbers, options, option replies.

/// The first eight bytes that a server sends ("NBDMAGIC").
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// The magic after [`INIT_MAGIC`], and at the start of every option ("IHAVEOPT").
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// The magic of every reply to an option.
pub const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Handshake flag of server and client: fixed newstyle.
pub const FIXED_NEWSTYLE: u16 = 1 << 0;
/// Handshake flag of server and client: no padding after EXPORT_NAME.
pub const NO_ZEROES: u16 = 1 << 1;

/// The bytes before an option's data: magic, number, length.
pub const OPTION_HEADER_LENGTH: usize = 16;
/// The bytes before a reply's data: magic, option, type, length.
pub const REPLY_HEADER_LENGTH: usize = 20;
/// The padding after the answer to EXPORT_NAME.
pub const PADDING_LENGTH: usize = 124;

/// An option that a client may send ("Option types").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ClientOption {
    /// Choose an export and go on to the transmission phase; a server can refuse it only by
    /// disconnecting.
    ExportName = 1,
    /// End the negotiation.
    Abort = 2,
    /// List the exports.
    List = 3,
    /// Encrypt the connection from here on.
    StartTls = 5,
    /// Describe an export.
    Info = 6,
    /// Describe an export and go on to the transmission phase.
    Go = 7,
    /// Use structured replies.
    StructuredReply = 8,
    /// List the metadata contexts of an export.
    ListMetaContext = 9,
    /// Select metadata contexts.
    SetMetaContext = 10,
    /// Use extended headers.
    ExtendedHeaders = 11,
}

impl ClientOption {
    const ALL: [Self; 10] = [
        Self::ExportName,
        Self::Abort,
        Self::List,
        Self::StartTls,
        Self::Info,
        Self::Go,
        Self::StructuredReply,
        Self::ListMetaContext,
        Self::SetMetaContext,
        Self::ExtendedHeaders,
    ];

    /// The number.
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// The option with this number, if there is one.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|option| option.number() == number)
    }
}

/// The type of a reply to an option ("Option reply types"). Types above 2^31 are errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ReplyType {
    /// The option is accepted, or its list is at its end.
    Ack = 1,
    /// An export of the list.
    Server = 2,
    /// Information about an export.
    Info = 3,
    /// A metadata context.
    MetaContext = 4,
    /// The server does not know or does not support the option.
    ErrUnsup = (1 << 31) + 1,
    /// The server does not allow the option.
    ErrPolicy = (1 << 31) + 2,
    /// The option is invalid, or is not allowed at this point.
    ErrInvalid = (1 << 31) + 3,
    /// TLS has to begin first.
    ErrTlsReqd = (1 << 31) + 5,
    /// The export does not exist.
    ErrUnknown = (1 << 31) + 6,
    /// The server is shutting down.
    ErrShutdown = (1 << 31) + 7,
    /// The option is too large to process.
    ErrTooBig = (1 << 31) + 9,
    /// Extended headers were negotiated, so structured replies cannot be chosen.
    ErrExtHeaderReqd = (1 << 31) + 10,
}

/// Information that INFO and GO can give ("NBD_REP_INFO").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum InfoType {
    /// Size and transmission flags.
    Export = 0,
    /// The canonical name.
    Name = 1,
    /// A line for people.
    Description = 2,
    /// The block sizes.
    BlockSize = 3,
}
