"""Message limits of every server and channel: set once, so that no hop keeps gRPC's silent 4 MiB default."""

from __future__ import annotations

#: Largest message on any hop. Bulk data (KV) is cut into frames of 1 MiB; a prompt of 256 k token ids is about 1 MiB;
#: hidden states of one prefill chunk are the largest thing (512 x 7168 x 4 B = 14 MiB).
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

#: Headers and trailers of a call. gRPC's own 8 KiB is less than a long test script, and a call beyond it fails with a
#: RESOURCE_EXHAUSTED that looks like overload.
MAX_METADATA_BYTES = 256 * 1024
_METADATA_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer that died without closing its socket (half-open TCP) is noticed within about 15 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Channels to one address must not share a connection's fate with another pool of the same process.
    ("grpc.use_local_subchannel_pool", 1),
    *_METADATA_OPTIONS,
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
    *_METADATA_OPTIONS,
)
