// Package icehouse is a client of Icehouse, a gRPC service for language models.
//
// Requests and answers are the API's own messages, from icehouse.dev/api/icehouse/v1. What the client
// adds goes for every call, those of the generated stubs in [Client] too: a deadline where the context
// has none, errors as [*Error], the published service config, the prefix key and credentials.
package icehouse
