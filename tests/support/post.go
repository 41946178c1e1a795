// Posts a file as Go programs do, and prints the status and the body of the answer: post URL FILE CONTENT_TYPE
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
)

func main() {
	file, err := os.Open(os.Args[2])
	if err != nil {
		panic(err)
	}
	answer, err := http.Post(os.Args[1], os.Args[3], file)
	if err != nil {
		panic(err)
	}
	body, _ := io.ReadAll(answer.Body)
	fmt.Println(answer.StatusCode, string(body))
}
