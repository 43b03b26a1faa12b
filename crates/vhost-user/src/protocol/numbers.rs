//! The numbers of the protocol.

/// Bytes of a message's header: request, flags, bytes of the payload.
pub const HEADER_BYTES: usize = 12;

/// The version of the protocol, in a header's flags.
pub const VERSION: u32 = 1;
/// The mask of the version in the flags.
pub const VERSION_MASK: u32 = 3;

/// Types of requests (`VHOST_USER_*`). Requests that belong to features that are not offered are
/// omitted.
pub mod request {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
}

/// Protocol features (`VHOST_USER_PROTOCOL_F_*`).
pub mod feature {
    const MQ: u64 = 1 << 0;
    const LOG_SHMFD: u64 = 1 << 1;
    /// A front-end may request an acknowledgement of each message.
    pub const REPLY_ACK: u64 = 1 << 3;
    const BACKEND_REQ: u64 = 1 << 5;
    const CONFIG: u64 = 1 << 9;
    const INFLIGHT_SHMFD: u64 = 1 << 12;
    const RESET_DEVICE: u64 = 1 << 13;
    const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;

    /// The features that are offered.
    pub const OFFERED: u64 = MQ
        | LOG_SHMFD
        | REPLY_ACK
        | BACKEND_REQ
        | CONFIG
        | INFLIGHT_SHMFD
        | RESET_DEVICE
        | CONFIGURE_MEM_SLOTS;
}

/// Whether a request uses the descriptors that come with it.
pub fn takes_descriptors(request: u32) -> bool {
    matches!(
        request,
        request::SET_MEM_TABLE
            | request::SET_LOG_BASE
            | request::SET_LOG_FD
            | request::SET_VRING_KICK
            | request::SET_VRING_CALL
            | request::SET_VRING_ERR
            | request::SET_BACKEND_REQ_FD
            | request::SET_INFLIGHT_FD
            | request::ADD_MEM_REG
    )
}

/// Whether a request has a reply of its own, which cannot report a refusal.
pub fn has_own_reply(request: u32) -> bool {
    matches!(
        request,
        request::GET_FEATURES
            | request::GET_PROTOCOL_FEATURES
            | request::GET_QUEUE_NUM
            | request::GET_MAX_MEM_SLOTS
            | request::GET_VRING_BASE
            | request::GET_CONFIG
            | request::GET_INFLIGHT_FD
            | request::SET_LOG_BASE
    )
}
