// Package icehouse is a client of Icehouse, a gRPC service for language models.
//
// Requests and responses are the messages of the API, from icehouse.dev/api/icehouse/v1. The client adds deadlines,
// typed errors (see [Error]), retries, credentials and the header for prefix routing (see [PrefixKey]). They apply to
// all calls, including those of the generated stubs in [Client].
package icehouse
