// The same JSON work as raw_asgi.py on Go's net/http and encoding/json: it limits nothing.
// Usage: PEER_KEY=... GOMAXPROCS=1 peer 127.0.0.1:0; prints the address that it listens on.
package main

import (
	"encoding/json"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"sync"
	"time"
)

type body struct {
	Namespace  string `json:"namespace"`
	Identifier string `json:"identifier"`
	Limit      int64  `json:"limit"`
	Duration   int64  `json:"duration"`
	Cost       *int64 `json:"cost"`
}

type meta struct {
	RequestID string `json:"requestId"`
}

type data struct {
	Success   bool  `json:"success"`
	Limit     int64 `json:"limit"`
	Remaining int64 `json:"remaining"`
	Reset     int64 `json:"reset"`
}

type answer struct {
	Meta meta `json:"meta"`
	Data data `json:"data"`
}

func main() {
	callers := map[string]string{"Bearer " + os.Getenv("PEER_KEY"): "workspace"}
	counts := map[string]int64{}
	var mutex sync.Mutex
	http.HandleFunc("/v2/ratelimit.limit", func(w http.ResponseWriter, r *http.Request) {
		if _, found := callers[r.Header.Get("Authorization")]; !found {
			w.WriteHeader(401)
			return
		}
		var call body
		decoder := json.NewDecoder(r.Body)
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(&call); err != nil || call.Duration < 1 {
			w.WriteHeader(400)
			return
		}
		cost := int64(1)
		if call.Cost != nil {
			cost = *call.Cost
		}
		mutex.Lock()
		counts[call.Identifier] += cost
		count := counts[call.Identifier]
		mutex.Unlock()
		reset := (time.Now().UnixMilli()/call.Duration + 1) * call.Duration
		text, err := json.Marshal(answer{meta{"req_0"}, data{true, call.Limit, max(0, call.Limit-count), reset}})
		if err != nil {
			w.WriteHeader(500)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Write(text)
	})
	listener, err := net.Listen("tcp", os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("listening on http://%s\n", listener.Addr())
	log.Fatal(http.Serve(listener, nil))
}
